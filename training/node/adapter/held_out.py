"""What a model is measured on: records it has not learned from, as samples. Runs on a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data import IGNORED, DataError, Sample
from training.data.answers import Rendered
from training.data.encode import Encoder
from training.data.readers import Bad, records
from training.data.sample import BadRecord


def samples_at(
    path: Path, tokenizer: Any, max_length: int, template_args: Mapping[str, Any] | None = None
) -> list[Sample]:
    """The samples of a data file, or of a prepared folder. Raises DataError."""
    if (path / "report.json").is_file():
        from training.data.prepared import open_prepared

        prepared = open_prepared(path)
        return [sample for number in range(prepared.rows) for sample in prepared.row(number)]
    encoder = Encoder(tokenizer, max_length, "assistant", template_args)
    samples = [sample for sample, _ in encoder.samples(_rendered(path, encoder)) if sample.learned]
    if not samples:
        raise DataError(f"{path}: no record has an answer within {max_length} tokens")
    return samples


def _rendered(path: Path, encoder: Encoder) -> list[Rendered]:
    bad, texts = Bad(skip=False), []
    for where, record in records(path, bad):
        try:
            texts += encoder.rendered(record)
        except BadRecord as error:
            bad.add(f"{where}: {error}")
    bad.refuse()
    return texts


@dataclass(frozen=True)
class Exchange:
    """What a sample asks, and the answer it has."""

    prompt: Sequence[int]
    reference: Sequence[int]


def exchange_of(sample: Sample) -> Exchange | None:
    """A sample's last answer and all before it; None where it is learned from its beginning, and asks nothing."""
    end = len(sample.labels)
    while end and sample.labels[end - 1] == IGNORED:
        end -= 1
    start = end
    while start and sample.labels[start - 1] != IGNORED:
        start -= 1
    return Exchange(sample.ids[:start], sample.ids[start:end]) if 0 < start < end else None
