"""Samples as tensors for the model: isolated from one another, targets already shifted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch.nn.utils.rnn import pad_sequence

from training.data.encode import shared_prefix
from training.data.sample import IGNORED, Sample


@dataclass(frozen=True)
class Batch:
    """LongTensors of one shape, (rows, length); one row where samples lie behind one another."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    """From 0 in each sample. Without a mask (and without a key-value cache) this is what keeps attention within
    a sample: transformers takes a position that restarts for the beginning of another sequence."""
    targets: torch.Tensor
    """What each position predicts; IGNORED at a sample's last and wherever nothing is learned."""
    attention_mask: torch.Tensor | None = None
    """Only where samples are padded: 1 on tokens, 0 on padding."""
    answers: tuple[int, ...] | None = None
    """Of pairs: the learned tokens of each sample in order, a chosen one and its rejected one in turn."""
    layout: tuple[tuple[int, int, int], ...] = ()
    """Of pairs in one row, one behind another: the tokens that both samples begin with, those of the chosen one, which
    stands whole, and those of the rejected one, of which the row holds what is behind that beginning."""


def collate(rows: Sequence[Sequence[Sample]], pad_id: int, batching: str, pairs: bool = False) -> Batch:
    """All samples of `rows` as one batch, of `pairs` each two of them. No samples at all give a batch of weight
    zero."""
    row_samples = list(chain.from_iterable(rows))
    if pairs and row_samples and batching != "padded":
        return _sharing(row_samples)
    samples = row_samples or [Sample([pad_id, pad_id], [IGNORED, IGNORED])]
    batch = _padded(samples, pad_id) if batching == "padded" else _joined(samples)
    return replace(batch, answers=tuple(sample.learned for sample in row_samples)) if pairs else batch


def _targets(sample: Sample) -> torch.Tensor:
    return torch.as_tensor([*sample.labels[1:], IGNORED], dtype=torch.long)


def _joined(samples: Sequence[Sample]) -> Batch:
    """Behind one another in a single row, positions restarting; no mask, as one would undo the isolation."""
    ids = torch.cat([torch.as_tensor(sample.ids, dtype=torch.long) for sample in samples])
    positions = torch.cat([torch.arange(len(sample.ids)) for sample in samples])
    targets = torch.cat([_targets(sample) for sample in samples])
    return Batch(ids[None], positions[None], targets[None])


def _sharing(samples: Sequence[Sample]) -> Batch:
    """Pairs behind one another in a single row; what both samples of a pair begin with stands there once."""
    ids, positions, targets, layout = [], [], [], []
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        layout.append((shared_prefix(chosen, rejected), len(chosen.ids), len(rejected.ids)))
        for sample, start in ((chosen, 0), (rejected, layout[-1][0])):
            ids.append(torch.as_tensor(sample.ids[start:], dtype=torch.long))
            positions.append(torch.arange(start, len(sample.ids)))
            targets.append(_targets(sample)[start:])
    rows = [torch.cat(parts)[None] for parts in (ids, positions, targets)]
    answers = tuple(sample.learned for sample in samples)
    return Batch(rows[0], rows[1], rows[2], answers=answers, layout=tuple(layout))


def _padded(samples: Sequence[Sample], pad_id: int) -> Batch:
    """One sample a row. Padding is masked by length, never by its id: a pad token that is also the end of turn
    would otherwise never be learned."""
    ids = pad_sequence([torch.as_tensor(sample.ids, dtype=torch.long) for sample in samples], True, pad_id)
    targets = pad_sequence([_targets(sample) for sample in samples], True, IGNORED)
    mask = pad_sequence([torch.ones(len(sample.ids), dtype=torch.long) for sample in samples], True)
    return Batch(ids, torch.arange(ids.shape[1]).expand(len(samples), -1).contiguous(), targets, mask)
