"""What a run has learned as the beginning of another: its adapter by --from-adapter, its merged model as a folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support import programs
from tests.support.tiny_adapter import write_base
from training.laptop import new_run
from training.laptop.head_node import HereHead
from training.laptop.open_cluster import launch_here
from training.laptop.start_run import resolve_recipe
from training.models import tiny
from training.models.names import resolve
from training.recipe.reading import with_changes
from training.recipe.recipe import RecipeError
from training.run.history import RECORD, WEIGHTS, EarlierStage, parse_record, record_text
from training.run.launch import LaunchError
from training.text.files import sha256_of

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[3]
STEPS = 3
SETTINGS = (
    *("max_length=96", "global_batch=4", "dtype=float32", "save_every=1", "lora.rank=4", "lora.dropout=0"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0", "logging.tensorboard=false"),
)


def fab(home: Path, *words: str, code: int = 0) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    env |= {"HOME": str(home), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [Path(sys.executable).with_name("fab"), "--search-root", str(ROOT), *words],
        cwd=home, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


def train(home: Path, *words: str, data: Path | None = None) -> tuple[Path, str]:
    """A run that ends well; its folder, and what was said."""
    before = set(home.glob("runs/*"))
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    said = fab(home, "train", "--here", "--anyway", "--data", str(data or home / "data.jsonl"), *settings, *words)
    (run,) = set(home.glob("runs/*")) - before
    return run, said


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """With a base model in a folder, and four records: every step learns from all of them."""
    home = tmp_path_factory.mktemp("home")
    write_base(home / "base")
    records = tiny.questions()[:4]
    (home / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return home


@pytest.fixture(scope="module")
def first(home: Path) -> Path:
    """Of one step more than what the second stage is given of it: without its last checkpoint, that is the newest."""
    words = ("--set", "batching=padded", "--steps", str(STEPS + 1))
    run, _ = train(home, "--model", str(home / "base"), *words)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS + 1}")
    return run


@pytest.fixture(scope="module")
def second(home: Path, first: Path) -> SimpleNamespace:
    run, said = train(home, "--from-adapter", first.name, "--steps", "2", "--set", "strategy=zero0")
    return SimpleNamespace(run=run, said=said)


def test_a_second_stage_goes_on_where_the_first_one_stood(first, second):
    assert losses(second.run)[0] == pytest.approx(losses(first)[STEPS], rel=1e-5)
    assert losses(second.run)[0] < losses(first)[0] - 0.01, "it began anew"
    assert f"begins with the adapter of {first.name}, step {STEPS}, and a new optimizer" in second.said


def test_the_adapter_of_a_second_stage_loads_in_plain_peft_and_has_moved_on(first, second, home):
    code = (
        "import sys; from peft import AutoPeftModelForCausalLM as Auto\n"
        "one, two = (dict(Auto.from_pretrained(folder).named_parameters()) for folder in sys.argv[1:])\n"
        "print(max(float((one[name] - two[name]).abs().max()) for name in one), one.keys() == two.keys())\n"
    )
    old = first / "checkpoints" / f"step-{STEPS}" / "adapter"
    argv = programs.forked(code, old, second.run / "adapter", peft=True)
    done = subprocess.run(argv, cwd=home, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    moved, same = done.stdout.split()
    assert 0 < float(moved) < 1 and same == "True"


def test_a_second_stage_says_what_it_began_with(first, second):
    (stage,) = parse_record((second.run / RECORD).read_text())
    weights = first / "checkpoints" / f"step-{STEPS}" / "adapter" / "adapter_model.safetensors"
    assert (stage.run_id, stage.step, stage.adapter) == (first.name, STEPS, sha256_of(weights))
    words = f"the adapter of {first.name}, step {STEPS}"
    assert f"| began with | {words} |" in (second.run / "adapter" / "README.md").read_text()
    assert f"begun with {words}" in (second.run / "logs" / "launcher.log").read_text()


def test_a_third_stage_knows_both_before_it(home, first, second):
    found = new_run.find_earlier(HereHead(home / "runs"), second.run.name)
    assert [stage.run_id for stage in found.stages] == [first.name, second.run.name]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora.rank": 8}, "it has lora.rank 4, not 8"),
        ({"lora.targets": ("q_proj",)}, "it has lora.targets all-linear, not \\['q_proj'\\]"),
        ({"tuning": "full"}, "it has tuning lora, not full"),
    ],
)
def test_another_adapter_is_refused_in_a_sentence(home, first, change, said):
    found = new_run.find_earlier(HereHead(home / "runs"), first.name)
    recipe = found.recipe({})
    with pytest.raises(LaunchError, match=said) as refused:
        found.refuse_other(with_changes(recipe, **change))
    assert "\n" not in str(refused.value)
    with pytest.raises(LaunchError, match="trained on another base model"):
        found.refuse_other_base("0" * 64)
    found.refuse_other(with_changes(recipe, **{"lora.dropout": 0.1}))
    found.refuse_other_base(found.base_model)


def test_another_model_is_refused_before_anyone_is_sent_to_fetch_it(home, first):
    tiny.write_data(home / "questions.jsonl")
    words = ("--from-adapter", first.name, "--model", "qwen2.5-0.5b-instruct", "--data", str(home / "questions.jsonl"))
    said = fab(home, "train", "--here", *words, code=2)
    assert f"--from-adapter {first.name}: it has base_model " in said and "leave --model out" in said
    assert "fetches it" not in said


def test_preferences_after_an_adapter_are_refused_for_their_reference_would_be_the_bare_base(home, first):
    (home / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in tiny.preferences()[:4]))
    before = set(home.glob("runs/*"))
    words = ("--from-adapter", first.name, "--set", "goal=dpo", "--data", str(home / "pairs.jsonl"))
    said = fab(home, "train", "--here", *words, code=2)
    assert said.endswith(
        f"--from-adapter {first.name}: goal = dpo needs what {first.name} has learned as its reference too, unchanged; "
        f"make it a model: fab merge --here --run {first.name}, then fab train --model ./runs/{first.name}/merged "
        "--data FILE --set goal=dpo --here\n"
    )
    assert set(home.glob("runs/*")) == before


def test_an_adapter_that_was_fetched_is_sent_to_the_head_and_refused_where_it_is_damaged(
    home, first, tmp_path, monkeypatch
):
    monkeypatch.chdir(home)
    head = HereHead(tmp_path)
    found = new_run.find_earlier(head, first.name)
    launch = launch_here(tmp_path / "tiny-20260101-000000", "training.node.finetune", "", tmp_path)
    found.put(head, launch)
    assert sha256_of(Path(launch.run_dir) / WEIGHTS) == found.stages[-1].adapter
    with pytest.raises(LaunchError, match="is damaged on this machine"):
        replace(found, stages=(EarlierStage(first.name, STEPS, "0" * 64, ""),)).put(head, launch)


def test_a_run_that_is_nowhere_is_one_sentence(home):
    said = fab(home, "train", "--here", "--from-adapter", "tiny-20260101-000000", code=2)
    assert said.count("\n") == 1 and "no checkpoint of it is on this machine" in said
    assert "the id of a run is expected" in fab(home, "train", "--here", "--from-adapter", "tiny", code=2)
    assert "leave --data, --from-adapter" in fab(home, "train", "--here", "--resume", "--from-adapter", "x", code=2)


@pytest.fixture(scope="module")
def merged(home: Path, first: Path) -> str:
    fab(home, "merge", "--here", "--run", first.name)
    return f"runs/{first.name}/merged"


def test_preferences_learned_by_a_merged_model_have_it_as_their_reference(home, first, merged):
    pairs = home / "pairs-of-merged.jsonl"
    pairs.write_text("".join(json.dumps(record) + "\n" for record in tiny.preferences()[:4]))
    run, _ = train(home, "--model", merged, "--steps", "2", "--set", "goal=dpo", "--set", "batching=padded", data=pairs)
    begun, moved = losses(run)
    assert begun == pytest.approx(math.log(2), rel=1e-6), "policy and reference are the same"
    assert moved < begun
    origin = json.loads((run / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert origin == str(home / merged)


def test_a_merged_model_is_a_base_model(home, first, merged):
    run, _ = train(home, "--model", merged, "--steps", "1", "--set", "batching=padded")
    assert losses(run)[0] == pytest.approx(losses(first)[STEPS], rel=1e-4)
    assert run.name.startswith("base-merged-"), "it is known by the recipe of the run that was merged"
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(home / merged)


def test_a_folder_that_is_not_there_is_told_as_such():
    assert resolve("runs/tiny-20260101-000000/merged").base.folder
    with pytest.raises(RecipeError, match="there is no such folder"):
        resolve_recipe("runs/tiny-20260101-000000/merged", ())


def test_the_record_of_stages_is_read_as_it_was_written():
    stages = (EarlierStage("a-20260101-000000", 3, "f" * 64, "d"), EarlierStage("b-20260102-000000", 5, "e" * 64, "d"))
    assert parse_record(record_text(stages)) == stages and parse_record("") == ()
    with pytest.raises(ValueError, match=RECORD):
        parse_record('[{"run_id": "x"}]')
