"""What a model is measured on: records it has not learned from, as samples. Runs on a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data import IGNORED, DataError, Sample, pairs
from training.data.answers import Rendered
from training.data.bad_records import CURE, Bad
from training.data.encode import Encoder
from training.data.readers import records
from training.data.sample import BadRecord


@dataclass(frozen=True)
class HeldOut:
    """Samples to be said; of pairs those of the chosen answers, and beside each that of the rejected one."""

    samples: Sequence[Sample]
    rejected: Sequence[Sample] = ()


def held_out_at(
    path: Path,
    tokenizer: Any,
    max_length: int,
    template_args: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> HeldOut:
    """What data files hold, or a prepared folder; with `skip_bad` without the records that cannot be used. Raises
    DataError."""
    if (path / "report.json").is_file():
        from training.data.prepared import open_prepared

        prepared = open_prepared(path)
        samples = [sample for number in range(prepared.rows) for sample in prepared.row(number)]
        return HeldOut(samples[::2], samples[1::2]) if prepared.report.pairs else HeldOut(samples)
    encoder = Encoder(tokenizer, max_length, "assistant", template_args)
    texts, paired = _rendered(path, encoder, skip_bad)
    samples = [sample for sample, _ in encoder.samples(texts)]
    if paired:
        both = zip(samples[::2], samples[1::2], strict=True)
        kept = [pair for pair in both if not pairs.fault(pair, max_length)]
        found = HeldOut([chosen for chosen, _ in kept], [rejected for _, rejected in kept])
    else:
        found = HeldOut([sample for sample in samples if sample.learned])
    if not found.samples:
        raise DataError(f"{path}: no record has an answer within {max_length} tokens")
    return found


def learned_before(given: HeldOut, trained: Path) -> int | None:
    """How many of the samples are, token for token, among the prepared ones; None where those do not lie there."""
    if not (trained / "report.json").is_file():
        return None
    from training.data.prepared import open_prepared

    prepared = open_prepared(trained)
    asked = Counter(tuple(sample.ids) for sample in given.samples)
    lengths = set(map(len, asked))
    there = (sample.ids for number in range(prepared.rows) for sample in prepared.row(number))
    return sum(asked.pop(tuple(ids), 0) for ids in there if len(ids) in lengths)


def _rendered(path: Path, encoder: Encoder, skip_bad: bool) -> tuple[list[Rendered], bool]:
    """The texts, and whether each two of them are a pair."""
    bad, texts, paired = Bad(skip_bad, cure=CURE), list[Rendered](), False
    for where, record in records(path, bad):
        paired = record.rejected is not None
        try:
            texts += pairs.rendered(encoder, record) if paired else encoder.rendered(record)
        except BadRecord as error:
            bad.add(where, str(error))
    bad.refuse(len(texts))
    return texts, paired


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
