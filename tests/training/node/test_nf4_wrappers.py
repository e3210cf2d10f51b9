"""Models that see images too with their text part in four bits: the rest of them stays as its files have it."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("bitsandbytes", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # noqa: E402
from bitsandbytes.nn import Linear4bit  # noqa: E402
from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402

from tests.support import type_proof as proof  # noqa: E402
from tests.training.node.test_experts import logits  # noqa: E402
from tests.training.node.test_nf4_experts import recipe_of, saved, stacks_of, trained, unpacked  # noqa: E402
from tests.training.node.test_types import config_of  # noqa: E402
from tests.training.node.test_wrappers import KINDS  # noqa: E402
from training.cost.memory import weight_bytes  # noqa: E402
from training.cost.strategies import cost_of  # noqa: E402
from training.node import architecture, nf4  # noqa: E402
from training.node.adapter.generate import load_base, with_adapter  # noqa: E402
from training.node.adapter.merge import merge  # noqa: E402
from training.node.model import whole_model  # noqa: E402
from training.node.outline import model_shape  # noqa: E402

pytestmark = pytest.mark.torch

LAYERS = ".language_model.layers."
WIDE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "vocab_size": 512}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A small model of a type by the names and in the files that transformers writes."""
    house = tmp_path_factory.mktemp("data") / "models"

    def of(kind, dtype=torch.bfloat16):
        folder = house / f"{kind}-{dtype}"
        if not folder.is_dir():
            torch.manual_seed(0)
            architecture.build(config_of(kind)).to(dtype).save_pretrained(folder)
        return folder

    return of


def _four(folder, dtype=torch.bfloat16):
    return nf4.load(nf4.ready(folder, dtype), folder, dtype=dtype)


def _plain(folder, dtype=torch.bfloat16):
    """By no code of ours."""
    experts = (
        {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    )  # torch's grouped kernels take no fp64
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, **experts).eval()


def _packed(four):
    """What lies in four bits, by the names of the parameters whose places it takes: unpacked."""
    linear = {f"{name}.weight": one.weight for name, one in four.named_modules() if isinstance(one, Linear4bit)}
    matrices = {name: dequantize_4bit(weight.data, weight.quant_state) for name, weight in linear.items()}
    return matrices | {name: stack.unpacked() for name, stack in stacks_of(four).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_parts_matrices_are_rounded_as_bitsandbytes_itself_would_and_nothing_else_is(kind, folder_of):
    four, plain = _four(folder_of(kind)), _plain(folder_of(kind))
    own, found = plain.state_dict(), _packed(four)
    linear = {f"{name}.weight" for name, one in plain.named_modules() if isinstance(one, nn.Linear)}
    routers = {name for name in linear if architecture.ROUTERS & set(name.split("."))}
    experts = {name for name, p in own.items() if ".experts." in name and p.dim() == 3}
    routed = routers if experts else set()
    assert found.keys() == {name for name in linear - routed if LAYERS in name} | experts
    for name, weight in found.items():
        row = own[name].flatten() if name in experts else own[name]
        right = dequantize_4bit(*quantize_4bit(row, quant_type="nf4", compress_statistics=True))
        assert torch.equal(weight.flatten(), right.flatten()), name
    mine = four.state_dict()
    left = own.keys() - found.keys()
    assert any("vision" in name or "visual" in name for name in left)
    assert all(mine[name].dtype == own[name].dtype and torch.equal(mine[name], own[name]) for name in left)


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_has_the_files_own_names_and_what_is_no_layer_to_the_bit(kind, folder_of):
    folder = folder_of(kind)
    entry = nf4.ready(folder, torch.bfloat16)
    source, made = load_file(folder / "model.safetensors"), nf4.read(entry, lambda name: True)
    beside = [name for name in source if ".layers." not in name or "language_model" not in name]
    assert beside and all(torch.equal(made[name], source[name]) for name in beside)
    assert {name for name in source if ".experts." not in name} <= made.keys()
    loaded = architecture.load(architecture.config_of(entry), entry, output_loading_info=True)
    assert not any(loaded[1].values()), loaded[1]


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_and_learns_what_its_weights_do_unpacked(kind, folder_of):
    folder = folder_of(kind)
    for again in ("true", "false"):
        recipe = recipe_of(gradient_checkpointing=again)
        four, plain = (trained(base, recipe, folder) for base in (None, unpacked(folder)))
        assert four.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
        assert four.gradients.keys() == plain.gradients.keys() == whole_model(recipe, folder).shapes.keys()
        for name, gradient in plain.gradients.items():
            assert gradient.any() and proof.relative(four.gradients[name], gradient) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_its_loss_is_near_that_of_sixteen_bits(kind, folder_of):
    folder = folder_of(kind)
    four, exact = (trained(None, recipe_of(base_precision=how), folder) for how in ("nf4", "dtype"))
    assert four.loss.item() == pytest.approx(exact.loss.item(), rel=0.05) and four.loss != exact.loss
    assert four.gradients.keys() == exact.gradients.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_a_plan_is_what_the_loaded_model_holds(kind, tmp_path):
    text = config_of(kind).get_text_config().to_dict()
    config = config_of(kind, text_config=text | {key: value for key, value in WIDE.items() if key in text})
    folder, recipe, shape = tmp_path / "models" / "wide", recipe_of(dtype="bfloat16"), model_shape(config)
    architecture.build(config).bfloat16().save_pretrained(folder)
    assert cost_of(recipe).misfit(shape, recipe, 1) == ""
    four = _four(folder)
    scales = [p.quant_state for p in four.parameters() if hasattr(p, "quant_state")]
    beside = [t for s in scales for t in (s.absmax, s.offset, s.state2.absmax)]
    held = [*four.parameters(), *(t for stack in stacks_of(four).values() for t in stack.buffers()), *beside]
    assert weight_bytes(shape, recipe) == pytest.approx(sum(t.nbytes for t in held), rel=0.005)
    assert weight_bytes(shape, recipe) < 0.8 * 2 * shape.parameters


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_the_adapter_around_a_plain_model_and_so_do_generate_and_merge(kind, folder_of, tmp_path):
    folder, recipe = folder_of(kind, torch.float32), recipe_of()
    small = trained(None, recipe, folder).small
    right = logits(small.model)
    adapter = saved(small, tmp_path / "run", recipe, folder)
    assert torch.equal(logits(with_adapter(load_base(folder, adapter), folder, adapter)), right)
    beside = PeftModel.from_pretrained(unpacked(folder), adapter)
    assert proof.relative(logits(beside), right) < 1e-5
    base = _plain(folder, torch.float64)
    without = logits(base)
    plain = logits(PeftModel.from_pretrained(base, adapter))
    merge(folder, adapter, tmp_path / "merged")
    merged = logits(_plain(tmp_path / "merged", torch.float64))
    assert proof.relative(merged, plain) < 1e-5 < 1e-1 * proof.relative(without, plain)
    assert proof.relative(merged, right) > 1e-2


def test_files_with_a_head_whose_settings_say_nothing_keep_it(tmp_path):
    """Mistral Small 3.x: the class would tie head and embedding."""
    folder = tmp_path / "models" / "small"
    config = config_of("mistral3", tie_word_embeddings=False)
    model = architecture.build(config).bfloat16()
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    assert said.pop("tie_word_embeddings") is said["text_config"].pop("tie_word_embeddings") is False
    (folder / "config.json").write_text(json.dumps(said))
    assert torch.equal(_four(folder).lm_head.weight, model.lm_head.weight)


def test_what_its_files_hold_beside_the_model_is_in_nobodys_way(folder_of, tmp_path):
    """A released Qwen3.5 brings a layer that guesses the token after the next, experts and all."""
    folder = tmp_path / "models" / "released"
    _plain(folder_of("qwen3_5_moe")).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layer = {name: tensor for name, tensor in tensors.items() if ".language_model.layers.1." in name}
    more = {f"mtp.layers.0.{name.partition('.layers.1.')[2]}": tensor.clone() for name, tensor in layer.items()}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    four, alone = _four(folder), _four(folder_of("qwen3_5_moe"))
    assert torch.equal(logits(four), logits(alone))
