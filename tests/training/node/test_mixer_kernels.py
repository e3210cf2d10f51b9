"""A hybrid's compiled kernels are taken where they keep the samples of a row apart, and nowhere else.

The kernels themselves need a GPU (test_gpu.py). Here transformers' own functions of Qwen3.5 stand in for them, called
once a sample inside the one call that a mixer makes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling  # noqa: E402

from tests.support import type_proof as proof  # noqa: E402
from tests.support.small_models import HYBRIDS  # noqa: E402
from tests.training.node.test_types import config_of  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import kernels, mixers  # noqa: E402
from training.node.attention import Segments  # noqa: E402

pytestmark = pytest.mark.torch

KIND = "qwen3_5_text"
CONV, RULE = modeling.causal_conv1d_fn, modeling.torch_chunk_gated_delta_rule
CALLS = []


@pytest.fixture(autouse=True)
def nothing_taken():
    mixers.AT_ONCE.clear()
    CALLS.clear()
    yield
    mixers.AT_ONCE.clear()


def convolution(hidden, weight, bias=None, activation=None, seq_idx=None, **_):
    """As causal_conv1d's: (1, channels, length), and of which sample each place is, which it keeps as int32."""
    if len(hidden) == 1:  # else the plain model's own call, of both samples apart
        CALLS.append(hidden.shape[-1])
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == (1, hidden.shape[-1]))
    lengths = [hidden.shape[-1]] if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    return torch.cat([CONV(part, weight, bias, activation=activation) for part in hidden.split(lengths, -1)], -1)


def delta_rule(*states, g, beta, cu_seqlens=None, seq_idx=None, **given):
    """As flash-linear-attention's: (1, length, ...) states, and where each sample begins and the last ends."""
    length = beta.shape[1]
    edges = torch.tensor([0, length]) if cu_seqlens is None else cu_seqlens
    assert edges[0] == 0 and edges[-1] == length
    parts = zip(*(each.split(edges.diff().tolist(), 1) for each in (*states, g, beta)), strict=True)
    outs = [RULE(*part[:-2], g=part[-2], beta=part[-1], **given) for part in parts]
    return torch.cat([out for out, _ in outs], 1), outs[-1][1]


def _deaf(kernel, name):
    return lambda *args, **given: kernel(*args, **{key: value for key, value in given.items() if key != name})


class _OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(_, hidden):
        return hidden.clone()

    @staticmethod
    def backward(_, gradient):
        return 1.1 * gradient


def _fails(*_, **__):
    raise RuntimeError("no kernel image\nis available")


WRONG = {
    "the convolution leaks": (_deaf(convolution, "seq_idx"), delta_rule),
    "the state leaks": (convolution, _deaf(delta_rule, "cu_seqlens")),
    "it says nan": (convolution, lambda *args, **given: (delta_rule(*args, **given)[0] * float("nan"), None)),
    "it fails": (convolution, _fails),
    "there is none": (CONV, RULE),
}


def _stand_in(monkeypatch, conv, rule):
    monkeypatch.setattr(modeling, "causal_conv1d_fn", conv)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", rule)


def test_kernels_that_keep_samples_apart_take_a_row_in_one_call_and_every_proof_holds(monkeypatch):
    _stand_in(monkeypatch, convolution, delta_rule)
    chosen = kernels.tried(config_of(KIND), torch.float32, "cpu")
    assert chosen.taken and "together" in chosen.words
    CALLS.clear()
    found = proof.proved(config_of(KIND))
    assert max(found.values()) < proof.LIMIT
    assert sum(proof.LENGTHS) in CALLS, "a row went through in one call"


def test_otherwise_each_sample_is_a_call(monkeypatch):
    _stand_in(monkeypatch, convolution, delta_rule)
    assert proof.packed(config_of(KIND)) < proof.LIMIT
    assert sum(proof.LENGTHS) not in CALLS and set(proof.LENGTHS) <= set(CALLS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [4, 8])
def test_they_are_tried_at_any_width_in_any_precision(monkeypatch, heads, dtype):
    """The projection that a mixer names first is its last, and as wide as its heads are together."""
    _stand_in(monkeypatch, convolution, delta_rule)
    chosen = kernels.tried(config_of(KIND, linear_num_value_heads=heads), dtype, "cpu")
    assert chosen.taken, chosen.words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_kernels_that_do_not_are_left_and_that_is_said_in_a_line(monkeypatch, wrong, dtype):
    _stand_in(monkeypatch, *WRONG[wrong])
    chosen = kernels.tried(config_of(KIND), dtype, "cpu")
    assert not chosen.taken and "one by one" in chosen.words and "\n" not in chosen.words
    assert ("differ by" in chosen.words) is ("leaks" in wrong or "nan" in wrong) and not mixers.AT_ONCE


def test_a_gradient_of_their_own_is_seen(monkeypatch):
    rule = lambda query, *rest, **given: delta_rule(_OtherGradient.apply(query), *rest, **given)  # noqa: E731
    _stand_in(
        monkeypatch,
        convolution,
        lambda *args, cu_seqlens=None, **given: (delta_rule if cu_seqlens is None else rule)(
            *args, cu_seqlens=cu_seqlens, **given
        ),
    )
    (module,), width = kernels.small_mixers(config_of(KIND), torch.float32, "cpu")
    agreement = kernels.agreement(module, width, torch.float32, "cpu")
    assert replace(agreement, gradient=0.0).within(torch.float32), "the values alone are right"
    assert agreement.gradient > 0.05 and not kernels.tried(config_of(KIND), torch.float32, "cpu").taken


def test_pairs_that_share_a_beginning_are_whole_for_the_kernels_too(monkeypatch):
    _stand_in(monkeypatch, convolution, delta_rule)
    (module,), width = kernels.small_mixers(config_of(KIND), torch.float32, "cpu")
    segments = Segments.of_pairs([(5, 12, 9), (3, 4, 20)])
    states = torch.randn(1, 12 + 4 + 4 + 17, width)
    together, apart = (way(module.forward, segments, states) for way in (mixers.at_once, mixers.one_by_one))
    assert together.shape == states.shape and torch.allclose(together, apart, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(HYBRIDS))
def test_no_type_takes_a_row_at_once_where_no_kernel_is_installed(kind):
    chosen = kernels.tried(config_of(kind), torch.float32, "cpu")
    assert not chosen.taken and re.search("can't keep packed|differ by [01]|position_embeddings", chosen.words)


@pytest.mark.parametrize(("kind", "device"), [(KIND, "meta"), (KIND, "cpu")])
def test_there_is_nothing_to_choose_without_a_kernel_or_a_gpu(kind, device):
    assert kernels.choose_mixers(config_of(kind), torch.float32, device) is None


def test_a_model_without_such_layers_is_not_told_of_them():
    assert kernels.tried(config_of("qwen3"), torch.float32, "cpu") is None


@pytest.mark.parametrize(("batching", "asked"), [("packed", True), ("padding-free", True), ("padded", False)])
def test_a_run_tries_them_where_its_rows_hold_several_samples(tmp_path, monkeypatch, batching, asked):
    config_of(KIND).save_pretrained(tmp_path)
    seen, said = [], []

    def choose(config, dtype, device):
        seen.append((config.model_type, dtype))
        return kernels.LossChoice(True, "together")

    monkeypatch.setattr(kernels, "choose_mixers", choose)
    rank = SimpleNamespace(run_dir=tmp_path, rank0_broadcast=lambda work: work(), say=said.append)
    kernels.choose_loss_and_mixers(load_recipe("tiny", {"batching": batching, "dtype": "float32"}), tmp_path, rank)
    assert (seen, said) == (([(KIND, torch.float32)], ["together"]) if asked else ([], []))
