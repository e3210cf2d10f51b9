"""The head fused with its cross-entropy gives what plain fp32 cross-entropy gives, without the logits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("peft", reason="needs the [train] extra")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from training.data.sample import IGNORED, Sample  # noqa: E402
from training.node.loss import fuse  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS, WIDTH, VOCABULARY = 120, 32, 500


def _case(dtype, trainable_head=False, bias=False):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype).requires_grad_(trainable_head)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (2, TOKENS // 2))
    targets[0, :40] = IGNORED
    targets[1, 5::7] = IGNORED
    return head, hidden, targets


def _plain(head, hidden, targets, scale):
    """Loss sum, correct predictions and the gradients of `scale` times the loss, all in fp32."""
    leaves = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    weight = wide[1] if len(wide) > 1 else head.weight.float()
    bias = wide[2] if len(wide) > 2 else None if head.bias is None else head.bias.float()
    logits = nn.functional.linear(wide[0].flatten(0, 1), weight, bias)
    loss = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    (loss * scale).backward()
    return loss.item(), (logits.argmax(1) == targets.flatten()).sum().item(), [leaf.grad for leaf in wide]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainable_head", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [16, 1024])
def test_values_and_gradients_are_those_of_plain_fp32_cross_entropy(dtype, trainable_head, bias, chunk):
    head, hidden, targets = _case(dtype, trainable_head, bias)
    loss, correct, grads = _plain(head, hidden, targets, 0.01)
    sums = fuse(head, chunk)(hidden, targets)
    (sums[0] * 0.01).backward()
    exact = dtype == torch.float32
    assert sums[0].item() == pytest.approx(loss, rel=1e-6 if exact else 2e-4)
    assert sums[1].item() == correct
    ours = [hidden.grad, *(p.grad for p in head.parameters() if p.requires_grad)]
    assert len(ours) == len(grads)
    for mine, theirs in zip(ours, grads, strict=True):
        assert mine.dtype == dtype
        assert (mine.float() - theirs).norm() < (1e-6 if exact else 1e-2) * theirs.norm()


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.seen = max(self.seen, tensor.numel())
        return out


@pytest.mark.parametrize("kind", ["frozen", "trainable", "with a LoRA of its own"])
def test_full_logits_never_exist(kind):
    head, hidden, targets = _case(torch.float32, trainable_head=kind == "trainable")
    targets = targets.clamp(min=0)
    model = _with_lora(head) if kind.startswith("with") else head
    loss = fuse(model, 16)
    with _Largest() as largest:
        loss(hidden, targets)[0].backward()
    assert largest.seen == VOCABULARY * max(16, WIDTH)
    with _Largest() as largest:
        nn.functional.linear(hidden, head.weight)
    assert largest.seen == TOKENS * VOCABULARY, "the measure itself sees logits where there are some"


def _peak_bytes(work):
    """Most that is allocated at once while `work` runs, inside torch's operations too."""
    from torch.profiler import ProfilerActivity, profile

    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    now = most = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_needs_what_the_plan_reckons_for_a_logit_and_leaves_nothing_beside_the_next(dtype, learning):
    from training.cost.memory import LOGIT

    chunk, vocabulary = 64, 20_000
    torch.manual_seed(0)
    hidden = torch.randn(1, 4 * chunk, WIDTH, dtype=dtype, requires_grad=learning)
    head = nn.Linear(WIDTH, vocabulary, bias=False).to(dtype).requires_grad_(False)
    targets = torch.randint(vocabulary, (1, 4 * chunk))
    loss = fuse(head, chunk)
    with torch.set_grad_enabled(learning):
        most = _peak_bytes(lambda: loss(hidden, targets))
    print(f"{most / chunk / vocabulary:.2f} bytes a logit in {dtype}, learning: {learning}")
    assert 0.7 * LOGIT < most / chunk / vocabulary < 1.05 * LOGIT


def test_positions_that_learn_nothing_never_reach_the_head():
    head, hidden, targets = _case(torch.float32)
    targets[0] = IGNORED
    learned = int((targets != IGNORED).sum())
    with _Largest() as largest:
        fuse(head, 1024)(hidden, targets)[0].backward()
    assert largest.seen == learned * VOCABULARY < TOKENS * VOCABULARY
    assert not hidden.grad[0].any() and hidden.grad[1].any()


def _with_lora(head):
    from peft import LoraConfig, get_peft_model

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = head

    lora = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    return get_peft_model(Model(), lora).base_model.model.lm_head


def test_a_head_with_a_lora_of_its_own_gives_the_gradient_of_its_matrices():
    head, hidden, targets = _case(torch.float32)
    adapted = _with_lora(head)
    logits = adapted(hidden).flatten(0, 1)
    nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum").backward()
    wanted = {name: p.grad.clone() for name, p in adapted.named_parameters() if p.requires_grad}
    expected, hidden.grad = hidden.grad.clone(), None
    adapted.zero_grad()
    sums = fuse(adapted, 16)(hidden, targets)
    sums[0].backward()
    assert torch.allclose(hidden.grad, expected, rtol=1e-5, atol=1e-6)
    assert wanted and all(
        torch.allclose(dict(adapted.named_parameters())[name].grad, grad, rtol=1e-4, atol=1e-5)
        for name, grad in wanted.items()
    )
    assert sums[1].item() == (logits.argmax(1) == targets.flatten()).sum().item()


@pytest.mark.parametrize("chunk", [16, 1024])
def test_a_weight_tied_to_the_embedding_gets_both_gradients(chunk):
    torch.manual_seed(0)
    table = nn.Embedding(VOCABULARY, WIDTH)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = table.weight
    ids, targets = torch.randint(VOCABULARY, (2, 1, 30))
    logits = head(table(ids)).flatten(0, 1)
    nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum").backward()
    expected, table.weight.grad = table.weight.grad.clone(), None
    fuse(head, chunk)(table(ids), targets)[0].backward()
    assert torch.allclose(table.weight.grad, expected, rtol=1e-5, atol=1e-6)


def test_a_batch_without_anything_to_learn_weighs_nothing_and_still_has_a_gradient():
    head, hidden, targets = _case(torch.float32, trainable_head=True)
    sums = fuse(head, 16)(hidden, torch.full_like(targets, IGNORED))
    sums[0].backward()
    assert sums.tolist() == [0, 0]
    assert not hidden.grad.any() and not head.weight.grad.any()


def test_without_gradient_nothing_is_kept_for_one():
    head, hidden, targets = _case(torch.float32, trainable_head=True)
    with torch.no_grad():
        sums = fuse(head, 16)(hidden.detach(), targets)
    assert not sums.requires_grad and sums[0].item() == pytest.approx(_plain(head, hidden, targets, 1)[0], rel=1e-6)


def test_any_cut_into_micro_batches_and_ranks_gives_the_gradient_of_the_plain_mean():
    from training.data.collate import collate

    torch.manual_seed(0)
    samples = [
        Sample(ids := torch.randint(10, (length,)).tolist(), [IGNORED] * asked + ids[asked:])
        for length, asked in ((5, 2), (17, 4), (3, 1), (9, 8))
    ]
    a, b, c, d = samples
    learned = sum(sample.learned for sample in samples)
    table, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    loss = fuse(head, 16)

    def gradient(cuts, batching):
        table.weight.grad = None
        for cut in cuts:
            batch = collate([cut], 0, batching)
            (loss(table(batch.input_ids), batch.targets)[0] / learned).backward()
        return table.weight.grad

    table.weight.grad = None
    losses = [
        nn.functional.cross_entropy(
            nn.functional.linear(table(torch.tensor(s.ids[:-1])), head.weight),
            torch.tensor(s.labels[1:]),
            reduction="none",
        )
        for s in samples
    ]
    kept = torch.cat([part[torch.tensor(s.labels[1:]) != IGNORED] for part, s in zip(losses, samples, strict=True)])
    assert len(kept) == learned
    kept.mean().backward()
    by_hand = table.weight.grad.clone()
    for cuts in ([[a, b, c, d]], [[a], [b], [c], [d]], [[a, c], [b], [d], []], [[a, b], [c, d], []]):
        for batching in ("packed", "padded"):
            assert torch.allclose(gradient(cuts, batching), by_hand, rtol=1e-5, atol=1e-7)
