"""A mixture's experts in four bits: they compute what the same weights do unpacked, hold what the plan counts, and are
refused where nobody has shown that."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("bitsandbytes", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # noqa: E402
from bitsandbytes.nn import Linear4bit  # noqa: E402
from peft import PeftModel  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from tests.support import type_proof as proof  # noqa: E402
from tests.support.small_models import VARIANTS  # noqa: E402
from tests.training.node.test_experts import logits  # noqa: E402
from tests.training.node.test_types import config_of  # noqa: E402
from training.cost.memory import weight_bytes  # noqa: E402
from training.cost.strategies import cost_of  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import architecture, model, nf4  # noqa: E402
from training.node.adapter.generate import load_base, with_adapter  # noqa: E402
from training.node.adapter.merge import merge  # noqa: E402
from training.node.architecture import ROUTERS  # noqa: E402
from training.node.checkpoint import base_model_hash  # noqa: E402
from training.node.head_check import LENGTHS, VOCABULARY  # noqa: E402
from training.node.nf4 import Stack  # noqa: E402
from training.node.outline import model_shape  # noqa: E402
from training.recipe.model_types import PACKED_EXPERTS, VARIED  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402

pytestmark = pytest.mark.torch

KINDS = sorted(PACKED_EXPERTS.difference(VARIED) | VARIANTS.keys())
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "mixtral")
EXACT = {"dtype": "float32", "lora.dropout": "0", "strategy": "zero0", "base_precision": "nf4", "loss_chunk": "16"}


def recipe_of(**settings):
    return load_recipe("tiny", EXACT | {key.replace("__", "."): value for key, value in settings.items()})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A small model of a type, in files as it was released: of most a matrix an expert."""
    house = tmp_path_factory.mktemp("data") / "models"

    def of(kind):
        if not (house / kind).is_dir():
            torch.manual_seed(0)
            architecture.build(config_of(kind)).float().save_pretrained(house / kind)
        return house / kind

    return of


def experts_of(adapted):
    layers = architecture.text_layers(model.causal_model(adapted))
    return [one for layer in layers for one in architecture.experts_modules(layer)]


def stacks_of(loaded):
    """By the names of the parameters whose places they take."""
    found = {name: one for name, one in loaded.named_modules() if isinstance(one, Stack)}
    return {name.removesuffix("_nf4"): one for name, one in found.items()}


def unpacked(folder, dtype=torch.float32):
    """The plain model with the weights that its four bits stand for."""
    four = nf4.load(nf4.ready(folder, dtype), folder, dtype=dtype)
    plain = architecture.load(architecture.config_of(folder), folder, dtype=dtype, attn_implementation=model.SEGMENTS)
    own = dict(plain.named_parameters())
    for name, stack in stacks_of(four).items():
        own[name].data = stack.unpacked()
    for name, one in four.named_modules():
        if isinstance(one, Linear4bit):
            own[f"{name}.weight"].data = dequantize_4bit(one.weight.data, one.weight.quant_state)
    return plain


@dataclass
class Trained:
    """A model with an adapter that does something, after one backward."""

    small: proof.Adapted
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def trained(base, recipe, folder):
    """`base` adapted, or what a run loads where there is none."""
    adapted = model.load(recipe, folder) if base is None else model.trainable(base, recipe, folder)
    mine = model.trainable_parameters(adapted)
    dice = torch.Generator().manual_seed(0)
    for _, p in sorted(mine.items()):
        p.data = (0.1 * torch.randn(p.shape, generator=dice)).to(p.dtype)
    ids = [torch.randint(3, VOCABULARY, (length,), generator=dice).tolist() for length in LENGTHS]
    samples = [proof.Sample(one, one) for one in ids]
    small = proof.Adapted(adapted, model.LossModel(adapted, recipe), samples)
    loss = small.loss(**proof.inputs(proof.collate([samples], 0, "packed"), "cpu"))[0]
    loss.backward()
    return Trained(small, loss.detach(), {name: p.grad for name, p in mine.items()})


@pytest.mark.representatives
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_in_four_bits_computes_and_learns_what_its_weights_do_unpacked(kind, folder_of):
    """With layers that are computed again, and with layers that keep what they need."""
    folder = folder_of(kind)
    for again in ("true", "false"):
        recipe = recipe_of(gradient_checkpointing=again)
        four, plain = (trained(base, recipe, folder) for base in (None, unpacked(folder)))
        assert stacks_of(four.small.model) and not stacks_of(plain.small.model)
        assert four.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
        assert four.gradients.keys() == plain.gradients.keys()
        mine, own = (one.small.model.peft_config["default"] for one in (four, plain))
        assert (mine.target_modules, mine.target_parameters) == (own.target_modules, own.target_parameters)
        for name, gradient in plain.gradients.items():
            assert proof.relative(four.gradients[name], gradient) < 1e-5, name
        assert any(gradient.any() for gradient in four.gradients.values())


@pytest.mark.representatives
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_is_to_the_bit_that_of_the_weights_rounded_once(kind, dtype, folder_of):
    folder = folder_of(kind)
    four = nf4.load(nf4.ready(folder, dtype), folder, dtype=dtype)
    plain = unpacked(folder, dtype)
    mine, own = four.state_dict(), plain.state_dict()
    left = [name for name in own if name in mine and mine[name].dtype != torch.uint8]
    assert left and all(torch.equal(mine[name], own[name]) and mine[name].dtype == own[name].dtype for name in left)
    assert not [n for n, one in four.named_modules() if isinstance(one, Linear4bit) and ROUTERS & set(n.split("."))]
    assert torch.equal(logits(four), logits(plain))


@pytest.mark.parametrize("kind", FAMILIES)
def test_experts_are_rounded_as_four_bits_round_and_as_bitsandbytes_itself_would(kind, folder_of):
    folder = folder_of(kind)
    whole = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    four = nf4.load(nf4.ready(folder, torch.float32), folder, dtype=torch.float32)
    stacks = stacks_of(four)
    assert stacks.keys() == {name for name, p in whole.items() if p.dim() == 3}
    for name, stack in stacks.items():
        codes, state = quantize_4bit(whole[name].data.flatten(), quant_type="nf4", compress_statistics=True)
        assert torch.equal(stack.codes, codes)
        assert torch.equal(stack.unpacked().flatten(), dequantize_4bit(codes, state).flatten())
        assert 0.05 < (stack.unpacked() - whole[name]).norm() / whole[name].norm() < 0.11
    biases = [name for name in whole if "experts" in name and "bias" in name]
    assert len(biases) == (4 if kind == "gpt_oss" else 0)
    assert all(torch.equal(four.get_parameter(name), whole[name]) for name in biases if "proj" in name)
    apart = logits(four) - logits(AutoModelForCausalLM.from_pretrained(folder))
    assert 0 < apart.norm() / logits(AutoModelForCausalLM.from_pretrained(folder)).norm() < 0.3


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "hunyuan_v1_moe"])
def test_routers_that_a_type_has_in_fp32_stay_so_beside_an_adapter_in_bf16(kind, folder_of):
    loaded = model.load(recipe_of(dtype="bfloat16"), folder_of(kind))
    routers = {p.dtype for name, p in loaded.named_parameters() if ".mlp.gate." in name}
    assert routers == {torch.float32}
    assert {p.dtype for p in loaded.parameters() if p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("again", [True, False])
def test_a_layer_that_is_computed_again_keeps_nothing_of_its_experts(again, folder_of, monkeypatch):
    """Notes would be taken past checkpointing, whose own hooks then saw nothing of them."""
    adapted = model.load(recipe_of(gradient_checkpointing=str(again).lower()), folder_of("qwen3_moe"))
    fused, kind = model.LossModel(adapted, recipe_of()), type(experts_of(adapted)[0])
    inner, gate = [], kind._apply_gate

    def watched(experts, projected):
        inner.append(StorageWeakRef(projected.untyped_storage()))
        return gate(experts, projected)

    monkeypatch.setattr(kind, "_apply_gate", watched)
    ids = torch.arange(3, 40).tolist()
    loss = fused(**proof.inputs(proof.collate([[proof.Sample(ids, ids)]], 0, "packed"), "cpu"))[0]
    assert [ref.expired() for ref in inner] == [again] * 2 and loss.requires_grad


def test_no_unpacked_stack_outlives_the_experts_forward(folder_of, monkeypatch):
    """Nor their backward; of a layer that is computed again it lives as long as that one's backward."""
    made, unpack = [], Stack.unpacked

    def watched(stack):
        made.append(unpack(stack))
        refs.append(StorageWeakRef(made[-1].untyped_storage()))
        return made.pop()

    refs: list[StorageWeakRef] = []
    monkeypatch.setattr(Stack, "unpacked", watched)
    for again in ("true", "false"):
        adapted = model.load(recipe_of(gradient_checkpointing=again), folder_of("qwen3_moe"))
        fused = model.LossModel(adapted, recipe_of())
        ids = torch.arange(3, 40).tolist()
        refs.clear()
        loss = fused(**proof.inputs(proof.collate([[proof.Sample(ids, ids)]], 0, "packed"), "cpu"))[0]
        assert len(refs) == len(stacks_of(adapted)) == 4 and all(ref.expired() for ref in refs)
        loss.backward()
        assert len(refs) == 2 * 4 and all(ref.expired() for ref in refs)


def test_the_memory_of_a_plan_is_what_the_loaded_mixture_holds(tmp_path):
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "vocab_size": 512}
    config, folder = config_of("qwen3_moe", **wide), tmp_path / "models" / "wide"
    architecture.build(config).bfloat16().save_pretrained(folder)
    recipe, shape = recipe_of(dtype="bfloat16"), model_shape(config)
    loaded = nf4.load(nf4.ready(folder, torch.bfloat16), folder, dtype=torch.bfloat16)
    scales = [p.quant_state for p in loaded.parameters() if hasattr(p, "quant_state")]
    beside = [t for s in scales for t in (s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code)]
    held = sum(t.nbytes for t in (*loaded.parameters(), *loaded.buffers(), *beside))
    assert weight_bytes(shape, recipe) == pytest.approx(held, rel=0.03)
    stacks = stacks_of(loaded).values()
    of_stacks = sum(t.nbytes for stack in stacks for t in stack.buffers())
    assert of_stacks == pytest.approx(0.516 * 2 * 8 * 3 * 256 * 256, rel=0.01) and held < 0.4 * 2 * shape.parameters


def test_samples_of_a_row_do_not_see_each_other(folder_of):
    small = trained(None, recipe_of(), folder_of("qwen3_moe")).small
    first, *others = small.samples
    changed = proof.Sample([(one + 1) % VOCABULARY for one in first.ids], first.labels)
    before, after = (small.hidden([one, *others])[len(first.ids) :] for one in (first, changed))
    assert proof.relative(after, before) < 1e-5


def saved(small, run, recipe, folder):
    """As a run's checkpoint has it."""
    small.model.save_pretrained(run / "adapter")
    state = {"recipe": recipe.compute_keys(), "base_model": base_model_hash(folder)}
    (run / "trainer_state.json").write_text(json.dumps(state))
    return run / "adapter"


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_peft_reads_the_adapter_around_a_plain_model_and_so_do_generate_and_merge(kind, folder_of, tmp_path):
    folder, recipe = folder_of(kind), recipe_of()
    small = trained(None, recipe, folder).small
    right = logits(small.model)
    adapter = saved(small, tmp_path / "run", recipe, folder)
    assert torch.equal(logits(with_adapter(load_base(folder, adapter), folder, adapter)), right)
    loaded = PeftModel.from_pretrained(unpacked(folder), adapter)
    assert proof.relative(logits(loaded), right) < 1e-5
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    merge(folder, adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert proof.relative(logits(merged), logits(plain)) < 1e-5
    assert proof.relative(logits(merged), right) > 1e-3


def test_a_model_in_several_files_becomes_the_same_four_bits(folder_of, tmp_path):
    folder = folder_of("qwen3_moe")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "models" / "cut", max_shard_size="60KB")
    assert len(list((tmp_path / "models" / "cut").glob("*.safetensors"))) > 3
    whole, cut = (nf4.ready(one, torch.float32) for one in (folder, tmp_path / "models" / "cut"))
    mine, others = (nf4.read(entry, lambda name: True) for entry in (whole, cut))
    assert mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def test_a_type_whose_experts_were_never_shown_to_be_packed_is_refused_by_the_plan_and_on_the_node(tmp_path):
    small = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4}
    config = AutoConfig.for_model("llama4_text", **small | {"num_attention_heads": 4, "num_key_value_heads": 2})
    config.save_pretrained(tmp_path)
    recipe = recipe_of(batching="padded")
    said = "base_precision nf4: the experts of a llama4_text, .* never shown .*; take base_precision=dtype"
    with pytest.raises(RecipeError, match=said):
        model.whole_model(recipe, tmp_path)
    assert "never shown" in cost_of(recipe).misfit(model_shape(config), recipe, 1)


def test_experts_that_lie_or_compute_otherwise_than_is_known_are_refused_before_anything_is_written(
    folder_of, monkeypatch, tmp_path
):
    folder = tmp_path / "models" / "olmoe"
    AutoModelForCausalLM.from_pretrained(folder_of("olmoe")).save_pretrained(folder)
    with monkeypatch.context() as patched:
        patched.setattr("training.node.adapter.weights._stacks", lambda converter: False)
        with pytest.raises(RecipeError, match=r"the files hold model\.layers\.0\..*not known here; take base_prec"):
            nf4.ready(folder, torch.float32)
    monkeypatch.setattr("training.node.nf4_making.experts_modules", lambda layer: [])
    with pytest.raises(RecipeError, match=r"experts of a olmoe compute in a way of their own; take base_precision"):
        nf4.ready(folder, torch.float32)
    assert [path.name for path in (tmp_path / "cache" / "nf4").iterdir()] == ["lock"]


def test_experts_that_are_more_than_bitsandbytes_counts_are_refused():
    more = {"n_routed_experts": 256, "moe_intermediate_size": 2048, "hidden_size": 7168, "num_hidden_layers": 4}
    shape = model_shape(AutoConfig.for_model("deepseek_v3", **more))
    said = cost_of(recipe_of()).misfit(shape, recipe_of(), 1)
    assert said == (
        "base_precision nf4: a layer's experts hold 7.5 billion weights in one projection, and bitsandbytes unpacks "
        "2.1 billion at once; take base_precision=dtype"
    )
    assert not cost_of(recipe_of()).misfit(model_shape(config_of("deepseek_v3")), recipe_of(), 1)


def test_an_adapter_of_experts_beside_four_bits_is_refused_by_the_recipe():
    with pytest.raises(RecipeError, match=r"take lora\.experts=false, or base_precision=dtype") as refused:
        recipe_of(lora__experts="true")
    assert "\n" not in str(refused.value)
