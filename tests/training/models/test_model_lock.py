"""models.lock: what a revision stands for, and what is said of a model that is another."""

from pathlib import Path

import pytest

from deploy.on_node import manifest
from training.laptop import base_model
from training.laptop.head_node import HereHead
from training.models import lock as model_lock
from training.models.lock import Pin, disagreement, pinned, read_pins, remember
from training.models.names import load_recipe, recipe_names
from training.recipe.base import TINY, Base
from training.recipe.recipe import RecipeError
from training.run.launch import Host, Launch, LaunchError

REPO, COMMIT, OTHER, FILES = "acme/model", "c" * 40, "d" * 40, "f" * 64
BASE = Base.parse(REPO)
RECORD = {"repo": REPO, "revision": "main", "commit": COMMIT, "hash": FILES}


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "models.lock"


def test_a_first_download_is_pinned_and_never_pinned_anew(lock: Path) -> None:
    assert remember(RECORD, BASE, "main", lock)
    assert read_pins(lock) == {(REPO, "main"): Pin(COMMIT, FILES)}
    assert not remember({**RECORD, "commit": OTHER}, BASE, "main", lock)
    assert remember({**RECORD, "revision": 'v"2', "commit": OTHER}, BASE, 'v"2', lock)
    assert pinned(read_pins(lock), BASE, "main").commit == COMMIT
    assert pinned(read_pins(lock), BASE, 'v"2').commit == OTHER
    assert [path.name for path in lock.parent.iterdir()] == [lock.name]


@pytest.mark.parametrize("odd", ["f" * 63, 7, None, ["f" * 64], f'{FILES}"\n[x]'])
def test_a_record_that_would_spoil_the_lock_is_refused_when_it_is_written(lock: Path, odd: object) -> None:
    remember({**RECORD, "revision": "v1"}, BASE, "v1", lock)
    before = lock.read_text()
    with pytest.raises(RecipeError, match="is not written"):
        remember({**RECORD, "hash": odd}, BASE, "main", lock)
    assert lock.read_text() == before


@pytest.mark.parametrize("record", [{"hash": FILES}, {**RECORD, "commit": "main"}, {**RECORD, "repo": "acme/other"}])
def test_what_no_hub_told_is_not_pinned(lock: Path, record: dict[str, str]) -> None:
    assert not remember(record, BASE, "main", lock)
    assert not remember({**RECORD, "repo": "built-in:tiny"}, TINY, "main", lock)
    assert not lock.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"commit": OTHER}, "is commit dddddddddddd there and cccccccccccc in models.lock"),
        ({"hash": "0" * 64}, "has other files there than those first fetched"),
        ({"repo": "acme/other"}, "the model that lies there is acme/other, not acme/model"),
    ],
)
def test_a_model_that_is_another_is_said(change: dict[str, str], said: str) -> None:
    pins = {(REPO, "main"): Pin(COMMIT, FILES)}
    assert disagreement(pins, RECORD, BASE, "main") is None
    assert said in str(disagreement(pins, {**RECORD, **change}, BASE, "main"))


def test_a_commit_stands_for_itself_and_another_revision_is_another_model() -> None:
    assert pinned({}, BASE, COMMIT) == Pin(COMMIT, "")
    assert "at main, not at v2" in str(disagreement({}, RECORD, BASE, "v2"))
    assert "is commit" in str(disagreement({}, RECORD, BASE, OTHER))


@pytest.mark.parametrize("text", ["[", "x = 1", '["a"."main"]\ncommit = "main"', '["a"."main"]\nfiles = ""'])
def test_a_lock_that_cannot_be_read_does_not_pass_for_an_empty_one(lock: Path, text: str) -> None:
    lock.write_text(text)
    with pytest.raises(RecipeError, match=r"models\.lock cannot be read"):
        read_pins(lock)


def test_every_recipe_is_pinned_or_will_be_at_its_first_use() -> None:
    pins = read_pins()
    for name in recipe_names():
        recipe = load_recipe(name)
        known = pinned(pins, recipe.base_model, recipe.revision).commit
        assert known or recipe.revision == "main" or not recipe.base_model.on_hub, name


def _te1() -> HereHead:
    """A head whose files are this machine's."""
    head = HereHead(Path())
    head.name, head.here = "te1", False  # type: ignore[misc]
    return head


def test_a_changed_model_is_said_before_anything_is_trained(
    lock: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = load_recipe("qwen2.5-0.5b")
    record = {**RECORD, "repo": str(recipe.base_model)}
    remember(record, recipe.base_model, "main", lock)
    monkeypatch.setattr(model_lock, "LOCK", lock)
    there = base_model.BaseModel({**record, "commit": OTHER}, "sums")
    monkeypatch.setattr(base_model, "base_model_on_head", lambda *_: there)
    launch = Launch("", "", (), "", (), "python", {}, str(tmp_path))
    with pytest.raises(LaunchError, match=r"is commit dddddddddddd there .* nothing is started"):
        base_model.find_base_model(_te1(), recipe, launch)
    there.record["commit"] = COMMIT
    assert base_model.find_base_model(_te1(), recipe, launch).files["base-model.SHA256SUMS"] == "sums"


def test_a_model_that_the_next_deploy_fetches_needs_that_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/bin/sh")
    launch = Launch(
        "", "", (), "", (), f"{tmp_path}/bin/python", {}, str(tmp_path / "models"), deploy="pyinfra base.py"
    )
    for names, is_named in ((("tiny",), True), (("acme/other",), False)):
        with pytest.raises(LaunchError, match=f"{launch.deploy}$") as refused:
            base_model.base_model_on_head(_te1(), launch, "tiny", names)
        assert ("lists 'tiny'; run the base deploy: " in str(refused.value)) == is_named
        assert ("add what --model said" in str(refused.value)) != is_named
    with pytest.raises(LaunchError, match=r"base.py, which fetches 29\.\d GB \(fab models says whether it fits\)$"):
        base_model.base_model_on_head(_te1(), launch, "qwen", (), Base.parse("Qwen/Qwen2.5-14B-Instruct"))


def test_a_head_that_does_not_know_the_other_nodes_by_name_needs_the_deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/bin/sh")
    for other, reason in (
        ("localhost", "te1 has no model m"),
        ("te2.invalid", "know the other nodes by name"),
    ):
        hosts = (Host("te1", "10.0.0.1", 1), Host(other, "10.0.0.2", 1))
        launch = Launch(
            "",
            "",
            hosts,
            "",
            (),
            f"{tmp_path}/bin/python",
            {},
            str(tmp_path / "models"),
            deploy="pyinfra base.py",
        )
        with pytest.raises(LaunchError, match=f"{reason}.* {launch.deploy}$"):
            base_model.base_model_on_head(_te1(), launch, "m", ("tiny",))


def test_the_record_and_the_manifest_of_a_model_on_the_head_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(
        "",
        "",
        (),
        "",
        (),
        f"{tmp_path}/env/bin/python",
        {},
        str(tmp_path),
        deploy="pyinfra base.py",
    )
    with pytest.raises(LaunchError, match=f"te1 has no Python environment .* {launch.deploy}$"):
        base_model.base_model_on_head(_te1(), launch, "m")
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to("/bin/sh")
    with pytest.raises(LaunchError, match=f"te1 has no model m at .* {launch.deploy}$"):
        base_model.base_model_on_head(_te1(), launch, "m", ("tiny", "no-such-recipe"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    manifest.seal(tmp_path / "m", "spotune-model.json", {"repo": REPO, "commit": COMMIT})
    found = base_model.base_model_on_head(_te1(), launch, "m")
    assert (found.record["commit"], found.sums) == (COMMIT, (tmp_path / "m/SHA256SUMS").read_text())
    assert set(found.files) == {"base-model.json", "base-model.SHA256SUMS"}
