"""What a snapshot's tags say: all of it comes back, within what the cloud allows."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.on_node import manifest
from inventory.cloud.values import CLUSTER_TAG
from inventory.renting.tags import INTENT_TAG, OWNER_TAG
from snapshots.listing import UNFROZEN_TAG, Contents, from_look, from_tags, in_words, to_tags
from snapshots.on_node import look

ROOT = Path(__file__).parents[2]
SHA = hashlib.sha256(b"a").hexdigest()
FULL = Contents(
    cluster="spotune",
    spotune="0.1.0",
    environment=SHA,
    torch="2.13.0+cu130",
    python="3.12.9",
    models=("qwen2.5-14b-instruct", "tiny"),
    run="qwen2.5-14b-20261121-101500",
    step=1200,
    written_gib=66.9,
    filesystem="ext4",
    keep=True,
    unfrozen=True,
)


def test_everything_comes_back_from_the_tags():
    assert from_tags(to_tags(FULL)) == FULL


def test_what_is_not_there_has_no_tag_and_comes_back_as_nothing():
    assert to_tags(Contents("spotune")) == {CLUSTER_TAG: "spotune"}
    assert from_tags({CLUSTER_TAG: "spotune"}) == Contents("spotune")


def test_step_0_is_a_step():
    assert from_tags(to_tags(Contents("a", run="r", step=0))).step == 0


@pytest.mark.parametrize("count", [0, 1, 20, 21, 400])
def test_the_tags_stay_within_the_clouds_limits_and_no_model_is_lost_uncounted(count):
    models = tuple(f"some-model-{n:03}-instruct" for n in range(count))
    given = Contents(**{**FULL.__dict__, "models": models})
    tags = to_tags(given)
    assert len({*tags, INTENT_TAG, OWNER_TAG, UNFROZEN_TAG}) <= 20
    for key, value in tags.items():
        assert 0 < len(key) <= 128 and 0 < len(value) <= 128
        assert not key.startswith(("aliyun", "acs:")) and "://" not in key + value
    back = from_tags(tags)
    assert len(back.models) + back.models_unnamed == count
    assert set(back.models) <= set(models)
    assert (count <= 20) == (back.models_unnamed == 0)


def test_names_with_the_encodings_own_signs_survive_and_an_endless_one_is_counted():
    odd = ("a b=c,d é", "x" * 200)
    back = from_tags(to_tags(Contents("a", models=odd)))
    assert (back.models, back.models_unnamed) == (odd[:1], 1)


def test_tags_somebody_wrote_by_hand_are_read_as_far_as_they_go():
    strange = {"spotune:step": "many", "spotune:written-gib": "", "spotune:models-1": "x y", "colour": "red"}
    assert from_tags(strange) == Contents("", models=("x", "y"))


def make_disk(disk):
    """A data disk as the deploy and two trainings leave it."""
    (disk / "env/bin").mkdir(parents=True)
    (disk / "env/bin/python").write_text("python")
    manifest.write(disk / "env")
    stamp = {"hash": SHA, "torch": "2.13.0+cpu", "python": "3.11.2"}
    (disk / "env/spotune-env.json").write_text(json.dumps(stamp))
    for name in ("tiny", "half"):
        (disk / "models" / name).mkdir(parents=True)
        (disk / "models" / name / "config.json").write_text("{}")
    manifest.seal(disk / "models/tiny", "spotune-model.json", {"repo": "built-in:tiny"})
    for run in ("tiny-20261120-235959", "tiny-20261121-000001", "check-20261121-100000", "prove-20261121-110000"):
        (disk / "runs" / run).mkdir(parents=True)
        (disk / "runs" / run / "recipe.toml").write_text('name = "tiny"\nmodel_dir = "tiny"\n\n[lora]\nrank = 1\n')
    for step in (8, 16, 9):
        folder = disk / "runs/tiny-20261121-000001/checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(str(step))
        manifest.write(folder)
    (disk / "runs/tiny-20261121-000001/checkpoints/.tmp-step-24").mkdir()
    return disk


def seen_on(disk):
    program = Path(look.__file__).read_text(encoding="utf-8")
    done = subprocess.run([sys.executable, "-", str(disk)], input=program, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_look_at_a_disk_finds_what_is_finished_and_the_newest_checkpoint_of_the_newest_training(tmp_path):
    disk = make_disk(tmp_path)
    inside = from_look(seen_on(disk), "spotune", "0.1.0", keep=False)
    assert (inside.environment, inside.torch, inside.python) == (SHA, "2.13.0+cpu", "3.11.2")
    assert inside.models == ("tiny",)
    assert (inside.run, inside.step) == ("tiny-20261121-000001", 16)
    assert seen_on(disk)["run"]["model_dir"] == "tiny"
    assert seen_on(disk)["mounted"] is False
    assert from_tags(to_tags(inside)) == inside


def test_what_is_used_of_a_disk_counts_what_the_file_system_keeps_for_itself(tmp_path):
    (tmp_path / "8:3").mkdir()
    (tmp_path / "8:3/size").write_text("40960\n")
    room = os.statvfs_result((4096, 4096, 4600, 4000, 3900, 0, 0, 0, 0, 255))
    whole = look.device_bytes(os.makedev(8, 3), tmp_path)
    assert whole == 5120 * 4096 and look.used_bytes(whole, room) == (5120 - 4000) * 4096
    assert look.device_bytes(os.makedev(8, 4), tmp_path) == 0, "it is not told"


def test_a_look_at_an_empty_disk_says_so(tmp_path):
    inside = from_look(seen_on(tmp_path), "spotune", "0.1.0", keep=False)
    assert in_words(inside) == ["no finished Python environment", "no base model", "no run"]


def test_programs_for_nodes_need_nothing_but_the_standard_library():
    programs = sorted((ROOT / "snapshots/on_node").glob("*.py"))
    assert len(programs) == 3
    for program in programs:
        lines = program.read_text(encoding="utf-8").splitlines()
        roots = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
        assert roots <= set(sys.stdlib_module_names), program.name
