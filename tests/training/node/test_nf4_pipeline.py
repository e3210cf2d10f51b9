"""Stages of a model in four bits, one after another in this process, against the whole model: the same sums and
gradients to the bit. Between ranks: tests/training/node/test_nf4_ranks.py.
"""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("bitsandbytes", reason="needs the [train] extra")

from bitsandbytes.nn import Linear4bit  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from tests.support.llama_shape import model_shape  # noqa: E402
from tests.support.tiny_adapter import write_variant  # noqa: E402
from training.cost.memory import weight_bytes  # noqa: E402
from training.data.collate import collate  # noqa: E402
from training.data.sample import Sample  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import model, nf4  # noqa: E402
from training.node.strategies.stage import StageModel  # noqa: E402

pytestmark = pytest.mark.torch

SIDES = {
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXACT = {"dtype": "float32", "lora.dropout": "0", "strategy": "pipeline", "base_precision": "nf4"}
CPU = torch.device("cpu")
KINDS = {
    "plain": {},
    "in bf16": {"dtype": "bfloat16"},
    "dora": {"lora.dora": "true"},
    "dora in bf16": {"lora.dora": "true", "dtype": "bfloat16"},
    "nothing checkpointed": {"gradient_checkpointing": "false"},
    "a module without lora": {"lora.targets": '["q_proj", "down_proj"]'},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model whose layers have biases and whose head is tied, in one file, and one of neither, in several."""
    folder = tmp_path_factory.mktemp("data") / "models"
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIDES, tie_word_embeddings=True)).bfloat16().save_pretrained(folder / "tied")
    LlamaForCausalLM(LlamaConfig(**SIDES)).bfloat16().save_pretrained(folder / "plain", max_shard_size="200KB")
    return folder


def _recipe(overrides):
    return load_recipe("tiny", EXACT | overrides)


def _batch(seed):
    dice = torch.Generator().manual_seed(seed)
    ids = [torch.randint(512, (n,), generator=dice).tolist() for n in (24, 9)]
    return collate([[Sample(one, one) for one in ids]], 0, "packed")


def _stirred(trained):
    """An adapter that does something, else half of the gradients are zero."""
    for name, p in trained.items():
        if "lora_B" in name:
            p.data = torch.linspace(-0.02, 0.02, p.numel()).to(p.dtype).view_as(p)
    return trained


def _whole(folder, recipe, seeds):
    """Sums of each batch, gradients of all, and the first values."""
    fused = model.LossModel(model.load(recipe, folder), recipe)
    trained = model.trainable_parameters(fused.model)
    first = {name: p.detach().clone() for name, p in trained.items()}
    _stirred(trained)
    sums = []
    for seed in seeds:
        out = fused(**model.inputs(_batch(seed), "cpu"))
        out[0].backward()
        sums.append(out.detach())
    return sums, {name: p.grad for name, p in trained.items()}, first


def _through(stages, inputs):
    """What goes out of the last, and the way back: what came into each and what went out of it."""
    passed, hidden = [], None
    for stage in stages:
        came = None if hidden is None else hidden.detach().requires_grad_()
        hidden = stage(came, **inputs)
        passed.append((came, hidden))
    return hidden, passed


def _staged(stages, seeds, looks=0):
    """The same of stages, each with `looks` at the batch after the first one's backward."""
    trained = {name: p for stage in stages for name, p in model.trainable_parameters(stage.model).items()}
    first = {name: p.detach().clone() for name, p in trained.items()}
    _stirred(trained)
    sums = []
    for seed in seeds:
        inputs = model.inputs(_batch(seed), "cpu")
        out, passed = _through(stages, inputs)
        sums.append(out.detach())
        slope = None
        for came, left in reversed(passed):
            (left[0] if slope is None else left).backward(slope)
            slope = None if came is None else came.grad
        for _ in range(looks):
            for stage in stages:
                stage.eval()
            with torch.no_grad():
                assert torch.equal(_through(stages, inputs)[0], sums[-1]), "a look computes what training does"
            for stage in stages:
                stage.train()
    return sums, {name: p.grad for name, p in trained.items()}, first


def _stages(folder, recipe, count):
    return [StageModel(recipe, folder, number, count, CPU) for number in range(count)]


@pytest.mark.parametrize(("count", "kind"), [*((2, kind) for kind in KINDS), (3, "plain")])
@pytest.mark.parametrize("name", ["tied", "plain"])
def test_stages_in_four_bits_compute_to_the_bit_what_the_whole_model_does(models, count, name, kind):
    """With looks between, which bitsandbytes would pack the weights for."""
    recipe = _recipe(KINDS[kind])
    sums, gradients, first = _whole(models / name, recipe, (1, 2))
    ours, found, mine = _staged(_stages(models / name, recipe, count), (1, 2), looks=2)
    assert all(torch.equal(a, b) for a, b in zip(ours, sums, strict=True))
    assert found.keys() == gradients.keys() == first.keys()
    assert not [name for name in first if not torch.equal(mine[name], first[name])]
    assert not [name for name in gradients if not torch.equal(found[name], gradients[name])]
    assert all(gradient.any() for gradient in gradients.values())


@pytest.fixture(scope="module")
def spoken(models):
    """One with a tokenizer and a head of its own."""
    tiny.write_model(models / "spoken", steps=2)
    return write_variant(models / "spoken", models / "untied", tied=False)


ENDS = {
    "rows of tokens": {"lora.trainable_tokens": '["<|im_end|>"]'},
    "the head trained whole": {"lora.modules_to_save": '["lm_head"]'},
    "a lora on the head": {"lora.targets": '["q_proj", "lm_head"]'},
}


@pytest.mark.parametrize("kind", ENDS)
def test_what_is_trained_at_the_ends_is_beside_layers_in_four_bits_what_it_is_in_the_whole_model(spoken, kind):
    recipe = _recipe(ENDS[kind])
    sums, gradients, first = _whole(spoken, recipe, (1, 2))
    ours, found, mine = _staged(_stages(spoken, recipe, 2), (1, 2), looks=1)
    assert all(torch.equal(a, b) for a, b in zip(ours, sums, strict=True))
    assert found.keys() == gradients.keys() == mine.keys()
    assert not [name for name in gradients if not torch.equal(found[name], gradients[name])]
    assert not [name for name in first if not torch.equal(mine[name], first[name])]


def test_a_stage_holds_its_own_layers_in_four_bits_and_trains_only_what_was_added(models, monkeypatch):
    read, whole = [], nf4.read

    def watched(entry, wanted):
        found = whole(entry, wanted)
        read.append({name.partition(".layers.")[2].partition(".")[0] for name in found})
        return found

    monkeypatch.setattr(nf4, "read", watched)
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    stages = _stages(models / "tied", _recipe({"dtype": "bfloat16"}), 2)
    assert read == [{"0", "1"}, {"2"}]
    for stage, layers in zip(stages, (2, 1), strict=True):
        packed = [module for module in stage.model.modules() if isinstance(module, Linear4bit)]
        assert len(packed) == 7 * layers and not any(module.support_avx512bf16_for_cpu for module in packed)
        assert {p.dtype for p in stage.model.parameters()} == {torch.uint8, torch.bfloat16}
        assert all(".lora_" in name for name, p in stage.model.named_parameters() if p.requires_grad)
        assert not any(p.is_meta for p in stage.model.parameters())


def test_the_memory_of_a_plan_is_what_the_stages_hold(tmp_path):
    config = LlamaConfig(**SIDES | {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 2000})
    folder = tmp_path / "models" / "wide"
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    recipe, shape = _recipe({"dtype": "bfloat16"}), model_shape(json.loads((folder / "config.json").read_text()))
    bytes_held = 0
    for stage in _stages(folder, recipe, 2):
        base = [p for name, p in stage.model.named_parameters() if ".lora_" not in name]
        states = [p.quant_state for p in base if hasattr(p, "quant_state")]
        beside = [t for s in states for t in (s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code)]
        bytes_held += sum(t.nbytes for t in (*base, *beside))
    assert weight_bytes(shape, recipe) == pytest.approx(bytes_held, rel=0.03)
