"""A folder on this machine as the base model: its recipe derived, a real run from it, mistakes in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_models import EXPERTS, LINEAR
from training.cost.shape import PlanError
from training.laptop import folder_model
from training.laptop.folder_model import folder_recipe, folder_shape, is_folder
from training.recipe import RecipeError
from training.sums import ORIGIN, SUMS

ROOT = Path(__file__).parents[1]
CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    mine = tmp_path / "My Model"
    mine.mkdir()
    (mine / "config.json").write_text(json.dumps(CONFIG))
    (mine / "model.safetensors").write_bytes(b"weights")
    (mine / "tokenizer_config.json").write_text("{}")
    return mine


@pytest.mark.parametrize(
    ("model", "is_one"),
    [("./x", True), ("/x", True), ("~/x", True), ("..", True), ("Qwen/Qwen3-8B", False), ("qwen3-8b", False)],
)
def test_what_is_taken_for_a_folder(model, is_one):
    assert is_folder(model) is is_one


def test_the_recipe_of_a_folder_is_derived_and_can_be_changed(folder: Path):
    recipe = folder_recipe(str(folder), {"lora.rank": "4"})
    assert (recipe.name, recipe.max_length, recipe.lora.rank) == ("my-model", 512, 4)
    assert recipe.base_model == f"folder:{folder}" and recipe.model_dir.startswith("my-model-")
    assert folder_shape(recipe.base_model).layers == 2
    other = folder.with_name("other") / "My Model"
    other.parent.mkdir()
    folder.rename(other)
    assert folder_recipe(str(other), {}).model_dir != recipe.model_dir


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"text_config": {}}, "a qwen3 knows more than text, and its text part was never shown to be trained alone"),
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are stored in awq"),
        ({"hidden_size": "wide"}, "no model can be built from its config.json: .*hidden_size"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused_in_a_sentence(folder: Path, config, said):
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises((RecipeError, PlanError), match=said) as refused:
        folder_recipe(str(folder), {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "its config.json cannot be read"),
        ("model.safetensors", "has no weights in safetensors"),
        ("tokenizer_config.json", "has no tokenizer"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_by_what(folder: Path, missing, said):
    (folder / missing).unlink()
    with pytest.raises(RecipeError, match=said):
        folder_recipe(str(folder), {})
    with pytest.raises(RecipeError, match="there is no such folder"):
        folder_recipe(str(folder / "nowhere"), {})


def test_it_lies_among_models_as_links_and_is_hashed_anew_only_where_it_changed(folder: Path, tmp_path, monkeypatch):
    recipe, models = folder_recipe(str(folder), {}), tmp_path / "models"
    before = folder_model.place(recipe, models)
    placed = models / recipe.model_dir
    assert (placed / "model.safetensors").resolve() == folder / "model.safetensors"
    names = {path.name for path in folder.iterdir()}
    assert (placed / SUMS).is_file() and names == {"config.json", "model.safetensors", "tokenizer_config.json"}
    with monkeypatch.context() as patched:
        patched.setattr(folder_model, "seal_model", None)
        assert folder_model.place(recipe, models) == before
    (placed / ORIGIN).write_text("{")
    assert folder_model.place(recipe, models) == before, "a damaged record is made again"
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert folder_model.place(recipe, models)["hash"] != before["hash"]


KINDS = {
    "qwen3": {},
    "gemma3_text": {"sliding_window": 16, "head_dim": 32},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {"sliding_window": 16, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": LINEAR | {"layer_types": 2 * LINEAR["layer_types"]},
}


SEEING = ("gemma3", "gemma4", "qwen3_5")
"""Types that see images too."""


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory):
    pytest.importorskip("torch", reason="needs the [train] extra")
    from tests.support.tiny_adapter import write_base

    return write_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.mark.torch
@pytest.mark.parametrize("kind", [*KINDS, *SEEING])
def test_a_folder_becomes_an_adapter_that_plain_peft_loads(tiny_base: Path, tmp_path: Path, kind):
    from tests.support.tiny_adapter import write_of_type, write_wrapper

    folder = tmp_path / f"tiny-{kind}"
    if kind in SEEING:
        write_wrapper(tiny_base, folder, kind)
    else:
        write_of_type(tiny_base, folder, kind, **KINDS[kind])
    data = tmp_path / "data.jsonl"
    subprocess.run([sys.executable, "-m", "training.tiny", "--data", str(data)], cwd=ROOT, check=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    env |= {"HOME": str(tmp_path), "COLUMNS": "160"}
    flags = ["--steps", "4", "--set", "max_length=128", "--set", "global_batch=4", "--set", "optimizer.warmup_steps=1"]
    fab = Path(sys.executable).with_name("fab")
    done = subprocess.run(
        [fab, "--search-root", str(ROOT), "train", "--model", str(folder), "--here", "--data", str(data), *flags],
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "verified" in done.stdout
    (adapter,) = tmp_path.glob("runs/*/adapter")
    auto = "AutoModelForImageTextToText" if kind in SEEING else "AutoModelForCausalLM"
    code = (
        f"import sys, torch; from peft import PeftModel; from transformers import {auto} as Auto\n"
        "base = Auto.from_pretrained(sys.argv[1], dtype=torch.float32).eval()\n"
        "ids = torch.arange(20, 90).unsqueeze(0)\n"
        "before = base(ids).logits.detach().clone()\n"
        "tuned = PeftModel.from_pretrained(base, sys.argv[2]).eval()\n"
        "print(float((tuned(ids).logits - before).abs().max()))\n"
    )
    told = subprocess.run([sys.executable, "-c", code, folder, adapter], capture_output=True, text=True, check=True)
    assert float(told.stdout.split()[-1]) > 0
    assert "missing" not in told.stderr, "PEFT looks for tensors that the adapter has not"
    assert "folder:" not in (ROOT / "training" / "recipes" / "models.lock").read_text()
