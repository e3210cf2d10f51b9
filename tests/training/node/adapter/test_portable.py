"""The adapter of a run in other hands: plain PEFT in a fresh process finds base model and tokenizer by itself."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")

from tests.support import programs
from tests.support.hub import COMMIT, Hub
from tests.support.small_models import WRAPPERS
from tests.support.tiny_adapter import write_adapter, write_base, write_wrapper
from training.laptop.open_cluster import launch_here
from training.models import card as model_card
from training.models.card import CardFacts, base_name, card, loading, read_facts
from training.node.checkpoint import faults
from training.recipe.base import Base
from training.recipe.reading import parse_recipe
from training.recipe.recipe import Recipe
from training.run.folder import MODEL_SUMS
from training.run.launch import launch_text
from training.text.files import ORIGIN, seal, seal_model, sums_of, sums_text

pytestmark = pytest.mark.torch
RUN = "tiny-20260131-154500"
RECIPE = """\
name = "tiny"
base_model = "%s"
model_dir = "tiny"
max_length = 128
global_batch = 4
steps = 3

[lora]
rank = 4
"""
LOAD = """\
import sys
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("how are you", return_tensors="pt").input_ids
with model.disable_adapter():
    before = model(ids).logits
print(float((model(ids).logits - before).abs().max()), tokenizer.chat_template is not None)
"""
LOAD_EACH = """\
import json, sys, torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM
ids, said = torch.arange(20, 90), {}
for kind, adapter in json.load(sys.stdin).items():
    for auto in (AutoPeftModel, AutoPeftModelForCausalLM):
        try:
            model = auto.from_pretrained(adapter, dtype=torch.float32).eval()
            with torch.no_grad(), model.disable_adapter():
                before = model(ids.unsqueeze(0)).logits[0]
            with torch.no_grad():
                tuned = model(ids.unsqueeze(0)).logits[0]
            said[f"{kind} {auto.__name__}"] = type(model.get_base_model()).__name__, before, tuned
        except Exception as error:
            said[f"{kind} {auto.__name__}"] = str(error)
torch.save(said, sys.argv[1])
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tiny")


def checkpoint_of(run: Path, base: Path, recipe: Recipe, write=write_adapter) -> Path:
    """A checkpoint as a run of this recipe writes it, with an adapter that is not zero."""
    folder = run / "checkpoints" / "step-3"
    write(base, folder / "adapter")
    (folder / "trainer_state.json").write_text(json.dumps({"step": 3, "base_model": "b" * 64, "data": "d" * 64}))
    (folder / "optimizer.safetensors").write_bytes(b"state")
    (run / "recipe.toml").write_text(recipe.to_toml())
    rows = [{"step": 3, "loss": 1.25}, {"step": 3, "validation_loss": 1.5}, {"step": 4, "loss": 0.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "data").mkdir()
    counts = {"records": 7, "samples": 9, "tokens": 1234, "learned_tokens": 500, "end_of_turn_learned": False}
    (run / "data" / "report.json").write_text(json.dumps({"report": counts}))
    (run / MODEL_SUMS).write_text(sums_text(sums_of(base)))
    model_card.complete(folder / "adapter", run, recipe, base)
    seal(folder)
    return folder


def loaded(adapter: Path, home: Path, **env: str) -> list[str]:
    """What a process that knows nothing else says of it: how much it changes, whether a chat can be written."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(adapter)],
        cwd=home, env={**kept, "HF_HOME": str(home / "hf"), **env}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_adapter_finds_its_base_model_on_the_hub_at_the_commit_it_was_trained_on(base: Path, tmp_path: Path):
    files = {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()}
    seal_model(base, repo="acme/tiny", revision="main", commit=COMMIT)
    folder = checkpoint_of(tmp_path / RUN, base, parse_recipe(RECIPE % "acme/tiny", None, "here"))
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("acme/tiny", COMMIT)
    with Hub({"acme/tiny": files}) as hub:
        changed, chat = loaded(folder / "adapter", tmp_path, HF_ENDPOINT=hub.url)
    assert float(changed) > 0 and chat == "True"
    (base / ORIGIN).unlink()


def test_an_adapter_of_a_folder_finds_it_by_its_path(base: Path, tmp_path: Path):
    folder = checkpoint_of(tmp_path / RUN, base, parse_recipe(RECIPE % f"folder:{base}", None, "here"))
    changed, _ = loaded(folder / "adapter", tmp_path, HF_HUB_OFFLINE="1")
    assert float(changed) > 0


def trained_by_us(base: Path, run: Path) -> tuple[Path, str, object]:
    """An adapter by our own code, as a run would leave it; the class of its model, and what that says with it."""
    import torch

    from training.data.collate import collate
    from training.data.sample import Sample
    from training.node import checkpoint, model
    from training.node.cross_entropy import Logits

    recipe = parse_recipe(RECIPE % f"folder:{base}" + "dropout = 0\n", {"dtype": "float32"}, "here")
    loaded = model.load(recipe, base)
    trained = {name: p.detach() for name, p in model.trainable_parameters(loaded).items()}
    for p in trained.values():
        p.copy_(0.1 * torch.randn_like(p))

    def write(_: Path, adapter: Path) -> None:
        adapter.mkdir(parents=True)
        checkpoint.write_weights(trained, adapter, full=False)
        model.config_writer(loaded)(adapter)

    causal, ids = model.causal_model(loaded), list(range(20, 90))
    batch = model.inputs(collate([[Sample(ids, ids)]], 0, recipe.batching), "cpu")
    batch.pop("targets")
    with torch.no_grad():
        hidden = model.LossModel(loaded, recipe).eval().hidden(**batch)[0]
        says = Logits.of(causal.config)(hidden @ causal.get_output_embeddings().weight.T)
    return checkpoint_of(run, base, recipe, write) / "adapter", type(causal).__name__, says


@pytest.fixture(scope="module")
def seeing(base: Path, tmp_path_factory):
    """Of each type that sees images too what our own model is and says, and what a fresh process makes of its adapter
    by PEFT's Auto classes."""
    pytest.importorskip("deepspeed", reason="needs the [train] extra")
    import torch

    home = tmp_path_factory.mktemp("seeing")
    ours = {kind: trained_by_us(write_wrapper(base, home / kind, kind), home / "runs" / kind) for kind in WRAPPERS}
    done = subprocess.run(
        programs.forked(LOAD_EACH, home / "said.pt", peft=True),
        input=json.dumps({kind: str(adapter) for kind, (adapter, *_) in ours.items()}),
        cwd=home, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ours, torch.load(home / "said.pt")


@pytest.mark.parametrize("auto", ["AutoPeftModel", "AutoPeftModelForCausalLM"])
@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_of_what_sees_images_too_the_auto_classes_of_peft_load_all_that_was_trained(seeing, kind, auto):
    (_, kind_trained, says), found = seeing[0][kind], seeing[1][f"{kind} {auto}"]
    assert not isinstance(found, str), found
    kind_loaded, before, tuned = found
    assert kind_loaded == kind_trained
    assert (says - tuned).norm() < 1e-5 * tuned.norm() < 1e-1 * (tuned - before).norm()


def test_what_lies_beside_an_adapter_is_among_the_checksums(base: Path, tmp_path: Path):
    tools = "additional_chat_templates/tool_use.jinja"
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / tools).parent.mkdir()
    (tmp_path / "base" / tools).write_text("{{tools}}")
    folder = checkpoint_of(tmp_path / RUN, tmp_path / "base", parse_recipe(RECIPE % "acme/tiny", None, "here"))
    assert faults(folder) == []
    names = {"README.md", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", tools}
    assert {f"adapter/{name}" for name in names} <= sums_of(folder).keys()
    (folder / "adapter" / "README.md").write_text("something else")
    assert faults(folder) == ["adapter/README.md is damaged"]


def test_the_card_beside_an_adapter_says_what_it_learned_from_and_how_to_load_it(base: Path, tmp_path: Path):
    folder = checkpoint_of(tmp_path / RUN, base, parse_recipe(RECIPE % "acme/tiny", None, "here"))
    text = (folder / "adapter" / "README.md").read_text()
    assert "7 records, 9 samples, 1,234 tokens, 500 learned tokens" in text
    assert "| final training loss | 1.2500 |" in text and "| lowest validation loss | 1.5000 |" in text
    assert f'AutoPeftModelForCausalLM.from_pretrained("runs/{RUN}/adapter")' in text and "merge_and_unload" in text
    assert f"vllm serve acme/tiny --enable-lora --max-lora-rank 8 --lora-modules tuned=runs/{RUN}/adapter" in text


def run_as_written(code, home):
    """What a process that knows nothing else makes of the Python of a card."""
    argv = programs.forked("\n".join([*code, "print(type(model).__name__)"]), peft=True)
    env = {**os.environ, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("name", ["built-in:tiny", "folder:/somewhere/else/tiny"])
def test_of_a_base_that_no_hub_has_the_code_of_the_card_loads_both_where_a_copy_lies(base: Path, tmp_path: Path, name):
    folder = checkpoint_of(tmp_path / RUN, base, parse_recipe(RECIPE % name, None, "here"))
    code, _ = loading(str(folder / "adapter"), read_facts(tmp_path / RUN, folder, merged=False))
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "to").symlink_to(base.parent)
    assert run_as_written(code, tmp_path) == ["Qwen2ForCausalLM"]
    assert f"fab merge --run {RUN} --fetch" in "\n".join(code)
    assert f'from_pretrained("runs/{RUN}/merged")' in code[-1]
    launch = launch_here(tmp_path / RUN, "training.node.finetune", "", tmp_path)
    (tmp_path / RUN / "launch.json").write_text(launch_text(launch))
    code, _ = loading("x", read_facts(tmp_path / RUN, folder, merged=False))
    assert f"fab merge --run {RUN} --here, then" in "\n".join(code)
    assert code[0] == "from peft import AutoPeftModelForCausalLM, PeftConfig"
    assert 'model = AutoPeftModelForCausalLM.from_pretrained("x")' in code


@pytest.mark.parametrize("at_hand", [True, False])
def test_the_code_of_the_card_refuses_another_base_than_the_adapters(base: Path, tmp_path: Path, at_hand):
    copy = tmp_path / "path" / "to" / "tiny"
    shutil.copytree(base, copy)
    folder = checkpoint_of(tmp_path / RUN, copy, parse_recipe(RECIPE % f"folder:{copy}", None, "here"))
    facts = read_facts(tmp_path / RUN, folder, merged=False)
    code, _ = loading(str(folder / "adapter"), facts, at_hand=at_hand)
    assert run_as_written(code, tmp_path) == ["Qwen2ForCausalLM"]
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(AssertionError, match=r"model.safetensors is not of the base that the adapter was trained on"):
        run_as_written(code, tmp_path)


def test_a_base_that_a_run_merged_is_named_by_that_run():
    assert base_name(Base.parse(f"folder:/home/anna/runs/{RUN}/merged")) == f"{RUN}-merged"
    assert (
        base_name(Base.parse("folder:/home/anna/tiny")) == "tiny" and base_name(Base.parse("acme/tiny")) == "acme/tiny"
    )


def test_the_code_of_the_card_of_what_sees_images_too_builds_the_class_that_was_trained(seeing, tmp_path: Path):
    adapter, trained, _ = seeing[0]["qwen3_5"]
    run = adapter.parents[2]
    code, _ = loading(str(adapter), read_facts(run, adapter.parent, merged=False))
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "to").symlink_to(run.parents[1])
    assert run_as_written(code, tmp_path) == [trained]


@pytest.mark.parametrize("name", ["我的 模型", "it's", 'a "b" \\n', "$(touch x); y"])
@pytest.mark.parametrize("merged", [True, False])
def test_a_name_with_blanks_or_marks_is_one_word_of_the_command_and_one_string_of_the_code(name, merged):
    recipe = parse_recipe(RECIPE % "acme/tiny", None, "here").to_toml()
    recipe = recipe.replace('"acme/tiny"', json.dumps(f"folder:/models/{name}", ensure_ascii=False))
    code, (*said, command) = loading(
        f"runs/{name}", CardFacts("run", 3, recipe, "b", "d", 1.0, None, (), merged=merged)
    )
    assert said == ([] if merged else ["# path/to: wherever the folder of the base lies"])
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", f"runs/{name}" if merged else f"path/to/{name}"]
    assert merged or words[-1] == f"tuned=runs/{name}"
    tree = ast.walk(ast.parse("\n".join(code)))
    strings = {each.value for each in tree if isinstance(each, ast.Constant)}
    assert strings == ({f"runs/{name}"} if merged else {f"runs/{name}", f"path/to/{name}"})


@pytest.mark.parametrize("here", [True, False])
def test_where_a_run_of_this_machine_merged_the_base_is_where_it_is_served_from(here):
    merged = "tiny-20261124-101500/merged"
    recipe = parse_recipe(RECIPE % "acme/tiny", None, "here").to_toml().replace("acme/tiny", f"folder:/x/runs/{merged}")
    facts = CardFacts("run", 3, recipe, "b", "d", 1.0, None, (), merged=False, here=here)
    _, serve = loading("x", facts)
    assert serve[-1].split()[2] == (f"runs/{merged}" if here else "path/to/tiny-20261124-101500-merged")
    assert len(serve) == (1 if here else 2), "where it may lie is said where that is not known"
    assert f"serve path/to/{merged.replace('/', '-')} " in card("x", facts, published=True)


@pytest.mark.parametrize(("rank", "room"), [(4, 8), (16, 16), (48, 64)])
def test_the_card_serves_an_adapter_with_the_smallest_room_vllm_knows(rank, room):
    text = (RECIPE % "acme/tiny").replace("rank = 4", f"rank = {rank}")
    assert f"--max-lora-rank {room} " in card("x", CardFacts("run", 3, text, "b", "d", 1.0, None, (), merged=False))


@pytest.mark.parametrize("changed", ["rank = 1024", "rank = 4\ndora = true"])
def test_the_card_promises_no_serving_of_what_vllm_has_no_room_for(changed):
    text = (RECIPE % "acme/tiny").replace("rank = 4", changed)
    said = card("x", CardFacts("run", 3, text, "b", "d", 1.0, None, (), merged=False))
    assert "vllm serve" not in said and "serve the merged model" in said
