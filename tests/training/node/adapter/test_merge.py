"""Merging: what PEFT would make, with the memory of one file, and refusals before anything is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny_adapter

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = pytest.mark.torch

from safetensors.torch import load_file, save_file  # noqa: E402

from training.node.adapter import merge  # noqa: E402
from training.node.adapter.generate import load_tuned  # noqa: E402
from training.text.files import ADAPTER_WEIGHTS, SUMS, parse_sums, seal, sha256_of  # noqa: E402
from training.text.problems import AdapterError  # noqa: E402


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    base = tiny_adapter.write_base(folder / "bf16")
    return {
        "bf16": base,
        "tied": tiny_adapter.write_variant(base, folder / "tied"),
        "untied": tiny_adapter.write_variant(base, folder / "untied", tied=False),
    }


def by_peft(base: Path, adapter: Path, dtype: str = "float32") -> dict[str, torch.Tensor]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(tiny_adapter.load(base, dtype), adapter)
    return model.merge_and_unload().state_dict()


CASES = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "rows": {"trainable_token_indices": {"embed_tokens": [0, 2, 5]}},
    "rows of both ends": {"trainable_token_indices": {"model.embed_tokens": [0, 2, 5], "lm_head": [0, 2, 5]}},
    "lora of the head": {"target_modules": ["q_proj", "lm_head"]},
    "dora of the head": {"target_modules": ["lm_head"], "use_dora": True},
    "lora of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora of the embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "lora of both": {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True},
}
IN_ONE_PLACE = {case for case, lora in CASES.items() if {"lm_head", "embed_tokens"} & {*lora.get("target_modules", ())}}
"""PEFT merges these into both places of a tied weight, although it computed with one: a test below checks them."""


@pytest.mark.parametrize(
    ("base", "case"),
    [(base, case) for base in ("tied", "untied") for case in CASES if base == "untied" or case not in IN_ONE_PLACE],
)
def test_in_fp32_every_weight_is_exactly_what_peft_merges(models, case: str, base: str, tmp_path: Path):
    adapter = tiny_adapter.write_adapter(models[base], tmp_path / "adapter", **CASES[case])
    merge.merge(models[base], adapter, tmp_path / "merged")
    ours = tiny_adapter.load(tmp_path / "merged").state_dict()
    theirs = by_peft(models[base], adapter)
    before = tiny_adapter.load(models[base]).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert any(not torch.equal(ours[name], before[name]) for name in ours)


@pytest.mark.parametrize("base", ["tied", "untied"])
@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_says_what_the_adapter_beside_its_base_does(models, case: str, base: str, tmp_path: Path):
    from peft import PeftModel

    adapter = tiny_adapter.write_adapter(models[base], tmp_path / "adapter", **CASES[case])
    merge.merge(models[base], adapter, tmp_path / "merged")
    ids = torch.arange(4, 44).view(1, -1)
    with torch.inference_mode():
        ours = tiny_adapter.load(tmp_path / "merged")(ids).logits
        theirs = PeftModel.from_pretrained(tiny_adapter.load(models[base]), adapter).eval()(ids).logits
        before = tiny_adapter.load(models[base])(ids).logits
    assert (ours - theirs).norm() < 1e-5 * theirs.norm() < 1e-2 * (before - theirs).norm()


def test_a_row_of_zeros_stays_one_where_doras_length_would_make_it_no_number(models, tmp_path: Path):
    untied = tiny_adapter.load(models["untied"])
    with torch.no_grad():
        untied.lm_head.weight[7] = 0
    untied.save_pretrained(tmp_path / "base")
    adapter = tiny_adapter.write_adapter(tmp_path / "base", tmp_path / "adapter", **CASES["dora of the head"])
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    for name in (name for name in tensors if "lora_B" in name):
        tensors[name][7] = 0
    save_file(tensors, adapter / ADAPTER_WEIGHTS)
    merge.merge(tmp_path / "base", adapter, tmp_path / "merged")
    head = tiny_adapter.load(tmp_path / "merged").lm_head.weight
    assert head.isfinite().all() and not head[7].any()


def test_rows_of_an_embedding_beside_a_lora_of_the_head_it_shares_are_refused(models, tmp_path: Path):
    both = {"target_modules": ["lm_head"], "trainable_token_indices": {"embed_tokens": [0, 2]}}
    adapter = tiny_adapter.write_adapter(models["tied"], tmp_path / "adapter", **both)
    with pytest.raises(AdapterError, match=r"each by itself.*take one of the two"):
        merge.merge(models["tied"], adapter, tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


def test_a_bf16_model_stays_bf16_and_differs_from_fp32_by_its_rounding_alone(models, tmp_path: Path):
    adapter = tiny_adapter.write_adapter(models["bf16"], tmp_path / "adapter")
    merge.merge(models["bf16"], adapter, tmp_path / "merged")
    ours = tiny_adapter.load(tmp_path / "merged", "bfloat16").state_dict()
    theirs = by_peft(models["bf16"], adapter)
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name].bfloat16())] == []


def test_the_folder_is_whole_sealed_and_loads_with_its_tokenizer(models, tmp_path: Path):
    from transformers import AutoTokenizer

    adapter = tiny_adapter.write_adapter(models["untied"], tmp_path / "adapter")
    made = merge.merge(models["untied"], adapter, tmp_path / "merged")
    sums = parse_sums((made.folder / SUMS).read_text())
    assert {name: sha256_of(made.folder / name) for name in sums} == sums
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"} <= sums.keys()
    assert len([name for name in sums if name.endswith(".safetensors")]) > 2
    index = json.loads((made.folder / "model.safetensors.index.json").read_text())
    theirs = json.loads((models["untied"] / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == theirs["weight_map"]
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert AutoTokenizer.from_pretrained(made.folder).chat_template
    assert not (tmp_path / ".merged.new").exists()


def test_what_a_tokenizer_has_in_a_folder_and_the_licence_are_in_the_merged_model_and_nothing_else(models, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(models["tied"], base)
    tools, others = "additional_chat_templates/tool_use.jinja", {"README.md", ".DS_Store", "NOTES.txt", "old.pkl"}
    (base / tools).parent.mkdir()
    for name in (tools, "LICENSE", *others):
        (base / name).write_text("{{tools}}")
    made = merge.merge(base, tiny_adapter.write_adapter(base, tmp_path / "adapter"), tmp_path / "merged")
    sums = parse_sums((made.folder / SUMS).read_text()).keys()
    assert {tools, "LICENSE", "chat_template.jinja", "config.json"} <= sums and not sums & others


def test_a_merged_base_model_ends_with_the_turn_and_an_instructed_one_as_it_did(models, tmp_path: Path):
    from transformers import AutoTokenizer

    base = tiny_adapter.write_base_like(models["tied"], tmp_path / "base")
    for number, model in enumerate((base, models["tied"])):
        adapter = tiny_adapter.write_adapter(model, tmp_path / f"adapter-{number}")
        made = merge.merge(model, adapter, tmp_path / f"merged-{number}")
        tokenizer = AutoTokenizer.from_pretrained(made.folder)
        ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
        said = json.loads((made.folder / "generation_config.json").read_text())
        assert said["eos_token_id"] == ends and said["repetition_penalty"] == 1.2
        sums = parse_sums((made.folder / SUMS).read_text())
        assert sums["generation_config.json"] == sha256_of(made.folder / "generation_config.json")


def test_another_base_model_is_refused(models, tmp_path: Path):
    adapter = tiny_adapter.write_adapter(models["tied"], tmp_path / "step-3" / "adapter")
    (tmp_path / "step-3" / "trainer_state.json").write_text(json.dumps({"base_model": "0" * 64}))
    with pytest.raises(AdapterError, match="trained on another base model"):
        merge.merge(models["tied"], adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_adapter_is_refused_by_name(models, tmp_path: Path, damage: str):
    adapter = tiny_adapter.write_adapter(models["tied"], tmp_path / "step-3" / "adapter")
    seal(adapter.parent)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000]) if damage == "cut" else weights.unlink()
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is missing or damaged; --checkpoint"):
        merge.merge(models["tied"], adapter, tmp_path / "merged")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is missing or damaged; --checkpoint"):
        load_tuned(models["tied"], adapter)
    assert not (tmp_path / "merged").exists()


def test_a_folder_with_something_in_it_is_left_alone(models, tmp_path: Path):
    adapter = tiny_adapter.write_adapter(models["tied"], tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "mine").write_text("x")
    with pytest.raises(AdapterError, match="is not empty"):
        merge.merge(models["tied"], adapter, tmp_path / "merged")
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["mine"]


def test_a_disk_too_small_is_said_with_needed_and_free(models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    adapter = tiny_adapter.write_adapter(models["tied"], tmp_path / "adapter")
    monkeypatch.setattr(merge, "ROOM_TO_SPARE", 2**50)
    with pytest.raises(AdapterError, match=r"needs \d+\.\d TiB at .*, \d+(\.\d)? [GT]iB are free"):
        merge.merge(models["tied"], adapter, tmp_path / "merged")
    assert not list(tmp_path.glob(".merged*"))


def test_an_adapter_for_another_architecture_is_refused_and_nothing_stays(models, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    adapter = tiny_adapter.write_adapter(models["tied"], tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    save_file({name.replace("layers.0", "layers.77"): t for name, t in load_file(path).items()}, path)
    with pytest.raises(AdapterError, match=r"which has no model\.layers\.77\."):
        merge.merge(models["tied"], adapter, tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


MEASURED = """
import sys
from pathlib import Path
from training.node.adapter import merge as program
from training.node.adapter.merge import merge
program.check_weights_match_config = lambda folder: None  # it is no whole model
def peak():  # VmHWM, because ru_maxrss is inherited from whoever started this process
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))
import torch
torch.ones(512, 512) @ torch.ones(512, 512)  # what the library keeps for itself
before = peak()
merge(*map(Path, sys.argv[1:]))
print(peak() - before)
"""


def test_no_more_than_two_files_worth_of_memory_is_used(tmp_path: Path):
    from safetensors.torch import save_file

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(64)]
    weight_map, pairs = {}, {}
    for shard in range(4):
        inside = names[shard * 16 : shard * 16 + 16]
        save_file({name: torch.randn(1024, 1024).bfloat16() for name in inside}, base / f"model-{shard}.safetensors")
        weight_map |= dict.fromkeys(inside, f"model-{shard}.safetensors")
    for name in names:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        pairs |= {f"{stem}.lora_A.weight": torch.randn(4, 1024), f"{stem}.lora_B.weight": torch.randn(1024, 4)}
    save_file(pairs, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (base / "config.json").write_text("{}")
    argv = [sys.executable, "-c", MEASURED, str(base), str(adapter), str(tmp_path / "merged")]
    frees_at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # what glibc keeps back is not the merge's
    place = Path(__file__).parents[4]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=place, env=frees_at_once)
    shard_bytes = (base / "model-0.safetensors").stat().st_size
    assert shard_bytes >= 16 * 1024 * 1024 * 2
    print(f"peak {int(done.stdout) / 2**20:.0f} MiB more, one file {shard_bytes / 2**20:.0f} MiB of 128")
    assert int(done.stdout) < 2 * shard_bytes
