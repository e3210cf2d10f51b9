"""Pairs of answers as samples: the chosen one and the rejected one, each with the prompt before it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from training.data.sample import IGNORED, BadRecord, Sample

if TYPE_CHECKING:
    from training.data.answers import Rendered
    from training.data.encode import Encoder
    from training.data.shapes import Record

SIDES = ("chosen", "rejected")


def rendered(encoder: Encoder, record: Record) -> list[Rendered]:
    """The texts of a preference, the chosen one first. Raises BadRecord."""
    assert record.rejected is not None, "the record is a preference"
    return [_one(encoder, side, name) for side, name in zip((record, record.rejected), SIDES, strict=True)]


def _one(encoder: Encoder, side: Record, name: str) -> Rendered:
    """The single text of a side: several would be several prompts, and no pair."""
    try:
        texts = encoder.rendered(side)
    except BadRecord as error:
        raise BadRecord(f"{name}: {error}") from error
    if len(texts) != 1:
        raise BadRecord(
            f"{name} has {len(texts)} answers of which the model's chat template shows some otherwise once others "
            "follow; leave one answer, and what is before it in the prompt"
        )
    return texts[0]


def shared_prefix(chosen: Sample, rejected: Sample) -> int:
    """Tokens that both begin with and that predict nothing which is learned: computed once for both, where a row holds
    samples one behind another (arXiv 2410.20305)."""
    most = min(_first_learned(chosen), _first_learned(rejected)) - 1
    alike = np.asarray(chosen.ids[:most]) == np.asarray(rejected.ids[:most])
    return most if alike.all() else int(alike.argmin())


def _first_learned(sample: Sample) -> int:
    """Its place; the first token is never predicted."""
    return 1 + int((np.asarray(sample.labels[1:]) != IGNORED).argmax())


def fault(pair: Sequence[Sample], max_length: int) -> str:
    """Why two samples, cut to `max_length`, teach no preference; empty where they do."""
    for sample, name in zip(pair, SIDES, strict=True):
        if not sample.learned:
            return (
                f"the prompt fills max_length {max_length}, so that nothing of {name} is left; raise max_length, or "
                "shorten the prompt"
            )
    chosen, rejected = pair
    if list(chosen.ids) == list(rejected.ids):
        return f"chosen and rejected have the same first {max_length} tokens, and the rest is cut off; raise max_length"
    return ""
