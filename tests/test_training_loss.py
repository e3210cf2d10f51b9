"""The loss is the mean over tokens of the whole batch, however the batch is cut up."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")

from training.data import IGNORED, Sample, collate  # noqa: E402
from training.loss import scaled_for_mean, token_loss_sum  # noqa: E402

pytestmark = pytest.mark.torch


def _samples():
    torch.manual_seed(0)
    made = []
    for length, asked in ((5, 2), (17, 4), (3, 1), (9, 8)):
        ids = torch.randint(10, (length,)).tolist()
        made.append(Sample(ids, [IGNORED] * asked + ids[asked:]))
    return made


def _gradient(weights, cut, world_size):
    """What an engine that sums over micro-batches and averages over ranks would see."""
    weights = weights.clone().requires_grad_()
    learned = sum(sample.learned for part in cut for sample in part)
    for part in cut:
        batch = collate(part, pad_id=0)
        logits = torch.nn.functional.one_hot(batch["input_ids"], 10).float() @ weights
        loss = scaled_for_mean(token_loss_sum(logits, batch["labels"]), learned, world_size) / world_size
        loss.backward()
    return weights.grad


def test_any_cut_into_ranks_and_micro_batches_gives_the_gradient_of_the_plain_mean():
    a, b, c, d = _samples()
    weights = torch.randn(10, 10, requires_grad=True)
    by_hand = -torch.cat([_log_probabilities(weights, sample) for sample in (a, b, c, d)]).mean()
    by_hand.backward()
    for cut, world_size in (
        ([[a, b, c, d]], 1),
        ([[a], [b], [c], [d]], 1),
        ([[a, c], [b], [d], []], 2),
        ([[a, b], [c, d], []], 3),
    ):
        gradient = _gradient(weights.detach(), cut, world_size)
        assert torch.allclose(gradient, weights.grad, rtol=1e-6, atol=1e-7)


def _log_probabilities(weights, sample):
    """Of each learned token, predicted from the one before it."""
    places = [i for i in range(1, len(sample.ids)) if sample.labels[i] != IGNORED]
    table = torch.log_softmax(weights, dim=-1)
    return torch.stack([table[sample.ids[i - 1], sample.ids[i]] for i in places])


def test_padding_is_masked_by_length_even_where_the_text_holds_the_pad_token():
    batch = collate([Sample([4, 0], [IGNORED, 0]), Sample([4, 5, 0], [IGNORED, 5, 0])], pad_id=0)
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORED, 0, IGNORED], [IGNORED, 5, 0]]
    assert batch["input_ids"].tolist() == [[4, 0, 0], [4, 5, 0]]


def test_an_empty_micro_batch_weighs_nothing_and_still_has_a_gradient():
    batch = collate([], pad_id=7)
    logits = torch.randn(*batch["input_ids"].shape, 10, requires_grad=True)
    loss = token_loss_sum(logits, batch["labels"])
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None and not logits.grad.any()
