"""Models that are counted on the head, from a laptop without torch, over a head that is this machine."""

from __future__ import annotations

import importlib.util
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("deepspeed", reason="needs the [train] extra")


from inventory.cloud.errors import NoCloud
from tests.support.hub import Hub
from tests.support.no_torch import fab_without_torch
from tests.support.paper_weights import write_weights
from training.cost.shape import PlanError
from training.laptop import derived, plan_options, preparing, small_files, start_run
from training.laptop.head_node import HeadError, HereHead
from training.laptop.open_cluster import Session
from training.laptop.plan_options import PlanWish
from training.models.folder import shape_of

pytestmark = pytest.mark.torch

REPO = "acme/My-Qwen3"
CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}


@pytest.fixture
def folder(tmp_path):
    mine = tmp_path / "My Model"
    mine.mkdir()
    for name, text in {
        "config.json": json.dumps(CONFIG),
        "tokenizer_config.json": "{}",
        "tokenizer.json": "{}",
    }.items():
        (mine / name).write_text(text)
    write_weights(mine)
    return mine


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    """One without torch."""
    find = importlib.util.find_spec
    lacks = ("torch", "deepspeed", "peft")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacks else find(name))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    small_files.looked_up.cache_clear()
    yield monkeypatch
    small_files.looked_up.cache_clear()


@pytest.fixture
def head(laptop, tmp_path):
    """Of its cluster; `opens` are the times that it was asked for."""
    found = HereHead(tmp_path / "runs")
    found.opens = []

    @contextmanager
    def opened(here):
        found.opens.append(here)
        yield Session(found)

    laptop.setattr(derived, "open_cluster", opened)
    return found


def test_a_folder_is_counted_on_the_head_once_and_nothing_of_it_stays_there(head, laptop, folder, tmp_path, capsys):
    recipe = start_run.resolve_recipe(str(folder), ["lora.rank=4"])
    assert recipe.lora.rank == 4 and recipe.max_length == 512 and head.opens == [False]
    shown = capsys.readouterr()
    assert f"{folder}: its layers are counted with torch and transformers, and this Python lacks torch; " in shown.err
    assert "this machine counts them by its config.json" in shown.err
    shape, _ = plan_options.subject(recipe, PlanWish())
    assert head.opens == [False], "what was counted is kept here"
    assert list(head.runs.iterdir()) == []
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    laptop.undo()
    assert shape == shape_of(folder, tmp_path / "counted here"), "what this machine counts where it can"


def test_a_model_of_the_hub_is_counted_on_the_head(head, laptop):
    with Hub({REPO: {"config.json": json.dumps(CONFIG).encode()}}) as hub:
        laptop.setenv("HF_ENDPOINT", hub.url)
        recipe = start_run.resolve_recipe(REPO, [])
    assert (str(recipe.base_model), recipe.max_length) == (REPO, 512) and head.opens == [False]
    assert plan_options.subject(recipe, PlanWish())[0].layers == 2 and list(head.runs.iterdir()) == []


def test_what_the_head_cannot_build_is_its_sentence(head, folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": "wide"}))
    with pytest.raises(PlanError, match=r"^My Model: no model can be built from its config.json: .*hidden_size"):
        start_run.resolve_recipe(str(folder), ())
    assert list(head.runs.iterdir()) == []


@pytest.mark.parametrize(
    ("told", "error", "said"),
    [
        ("", HeadError, "ended without an answer"),
        ("[1]", HeadError, "ended without an answer"),
        ("{}", PlanError, "the outline of a model cannot be read"),
        ('{"x": {"kind": "qwen3", "hidden": "wide"}}', PlanError, "the outline of a model cannot be read"),
        ("\x1b[2Jmoved; exit 7", HeadError, r"ended with 7: \\x1b\[2Jmoved"),
    ],
)
def test_what_a_head_tells_is_checked_before_it_is_kept(head, laptop, folder, tmp_path, *, told, error, said):
    words, _, more = told.partition("; ")
    command = f"printf '%s\\n' '{words}'; {more}"
    laptop.setattr(preparing, "program_command", lambda *_, **__: command)
    with pytest.raises(error, match=said) as refused:
        start_run.resolve_recipe(str(folder), ())
    assert "\x1b" not in str(refused.value) and not (tmp_path / "home" / ".cache").exists()


def test_without_torch_and_without_a_head_one_sentence_says_what_is_possible(laptop, folder):
    @contextmanager
    def opened(here):
        raise NoCloud("no cloud answers")
        yield

    laptop.setattr(derived, "open_cluster", opened)
    laptop.chdir(folder.parent)
    with pytest.raises(PlanError) as refused:
        start_run.resolve_recipe("./My Model", [])
    assert str(refused.value) == (
        "./My Model: its layers are counted with torch and transformers, and this Python lacks torch: "
        "pip install -e '.[train]' (README.md says how to take the small torch, without CUDA), "
        "or fab up and the base deploy first, so that the head counts them; it cannot now: no cloud answers"
    )


def test_a_head_that_was_not_deployed_names_the_base_deploy(head, laptop, folder):
    bare = Session.launch_of
    laptop.setattr(Session, "launch_of", lambda *words: replace(bare(*words), python="/nowhere", deploy="pyinfra x"))
    with pytest.raises(PlanError, match=r"it cannot now: this machine has no Python environment .* deploy: pyinfra x$"):
        start_run.resolve_recipe(str(folder), ())


def test_a_start_on_this_machine_asks_no_head_for_a_count(folder, tmp_path):
    done = fab_without_torch(tmp_path, "train", "--model", "./My Model", "--here")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "--here needs torch, deepspeed, peft in this Python: pip install -e '.[train]'\n"


@pytest.mark.parametrize("task", ["plan", "train", "models.add"])
def test_a_laptop_without_torch_and_without_machines_is_told_so_by_every_command(folder, tmp_path, task):
    model = REPO if task == "models.add" else "./My Model"
    (tmp_path / "cluster.toml").write_text('name = "mine"\nprovider = "static"\n')
    with Hub({REPO: {"config.json": json.dumps(CONFIG).encode()}}) as hub:
        where = {"SPOTUNE_CLUSTER": str(tmp_path / "cluster.toml"), "HF_ENDPOINT": hub.url}
        done = fab_without_torch(tmp_path, task, "--model", model, **where)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert said.startswith(f"{model}: its layers are counted") and "or fab up and the base deploy" in said
