"""What only a GPU can show of the engine's arithmetic, held against the same in fp32 on the CPU."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("transformers", reason="needs the [train] extra")

from tests.support.skips import GPU  # noqa: E402
from training.node.attention import Segments, segment_attention  # noqa: E402
from training.node.loss import linear_cross_entropy  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=GPU),
]
LENGTHS = (5, 130, 1, 64)


def close(ours, right, tolerance):
    gap = (ours.float().cpu() - right).norm() / right.norm()
    assert gap < tolerance, float(gap)


def test_the_one_kernel_for_packed_rows_agrees_with_every_sample_by_itself():
    torch.manual_seed(0)
    length = sum(LENGTHS)
    q, k, v = (torch.randn(1, heads, length, 64, requires_grad=True) for heads in (8, 2, 2))
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0)
    right, _ = segment_attention(torch.nn.Identity(), q, k, v, None, segments=Segments.of(positions))
    slope = torch.randn_like(right)
    right.backward(slope)
    on_card = [t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in (q, k, v)]
    ours, _ = segment_attention(torch.nn.Identity(), *on_card, None, segments=Segments.of(positions, "cuda"))
    ours.backward(slope.to(ours))
    close(ours, right, 2e-2)
    for mine, theirs in zip(on_card, (q, k, v), strict=True):
        close(mine.grad, theirs.grad, 2e-2)


@pytest.mark.parametrize("bias", [False, True], ids=["liger where installed", "our own path"])
def test_the_fused_loss_in_bf16_agrees_with_plain_fp32(bias):
    """A head with a bias always takes our own path."""
    if not bias and importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed")
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 128, requires_grad=True), torch.randn(5000, 128) / 11
    offset = torch.randn(5000) if bias else None
    targets = torch.randint(5000, (300,))
    targets[::7] = -100
    logits = hidden @ weight.T + (0 if offset is None else offset)
    right = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    right.backward()
    on_card = hidden.detach().to("cuda", torch.bfloat16).requires_grad_()
    narrow = [None if t is None else t.to("cuda", torch.bfloat16) for t in (weight, offset)]
    loss, _ = linear_cross_entropy(on_card, *narrow, targets.cuda(), 128)
    loss.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-2)
    close(on_card.grad, hidden.grad, 3e-2)


def test_compiled_kernels_of_a_hybrid_keep_the_samples_of_a_row_apart():
    if None in map(importlib.util.find_spec, ("fla", "causal_conv1d")):
        pytest.skip("flash-linear-attention and causal-conv1d are not installed")
    from tests.training.node.test_types import config_of
    from training.node import kernels

    chosen = kernels.choose_mixers(config_of("qwen3_5_text"), torch.bfloat16, "cuda")
    kernels.AT_ONCE.clear()
    assert chosen.taken, chosen.words
