"""Prepared data: tokenised samples and packed rows as memory-mapped arrays in a sealed folder.

ids.i32        the tokens of all samples, one behind another     learned.u8   1 where a token is learned
starts.npy     where each sample begins in these, and the end    counts.npy   how many tokens of each are learned
members.npy    sample numbers, row after row                     rows.npy     where each row begins in members
report.json    what there is to say about all this               SHA256SUMS   the seal, written last
shared.npy     of pairs of samples alone: the tokens of each that are computed once for both
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from training.data.encode import shared_prefix
from training.data.report import DataReport
from training.data.sample import IGNORED, DataError, Sample
from training.text.files import SUMS, parse_sums, seal, sums_of


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Sample numbers of each row: the longest first, each into the fullest row that still has room for it.

    Sorting apart, the time grows with the number of samples alone, and equal lengths always give equal rows.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # that some open row has left, ascending
    open_rows: dict[int, list[int]] = {}
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        if not 0 < length <= max_length:
            raise ValueError(f"sample {number} has {length} tokens; a row holds 1 to {max_length}")
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, left = len(rows), max_length - length
            rows.append([])
        else:
            room = rooms[place]
            row, left = open_rows[room].pop(), room - length
            if not open_rows[room]:
                del rooms[place], open_rows[room]
        rows[row].append(number)
        if left:
            if left not in open_rows:
                insort(rooms, left)
            open_rows.setdefault(left, []).append(row)
    return rows


REPORT = "report.json"
IDS, LEARNED = "ids.i32", "learned.u8"
SHARED = "shared"
ARRAYS = ("starts", "counts", "members", "rows")


class Prepared:
    """An opened folder: views on its arrays and the counts of each row, nothing more in memory."""

    def __init__(self, folder: Path) -> None:
        self.report = DataReport(**json.loads((folder / REPORT).read_text(encoding="utf-8")))
        self.content_hash = self.report.content_hash
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS]
        self._starts, counts, self._members, self._rows = arrays
        self._ids: Any = np.memmap(folder / IDS, dtype="<i4", mode="r")
        self._learned: Any = np.memmap(folder / LEARNED, dtype="u1", mode="r")
        self.rows = len(self._rows) - 1
        first = self._rows[:-1]
        self.lengths = np.diff(self._starts)
        """Of each sample."""
        self.tokens = np.add.reduceat(self.lengths[self._members], first)
        """Of each row; what a pair begins with counts once where it is computed once."""
        if (folder / f"{SHARED}.npy").exists():
            shared = np.load(folder / f"{SHARED}.npy", mmap_mode="r")
            self.tokens = self.tokens - np.add.reduceat(shared[self._members[::2] // 2], first // 2)
        self.learned = np.add.reduceat(counts[self._members], first)
        """Of each row, so that every rank knows a whole batch's count without exchange."""
        self.counted = np.diff(self._rows) // 2 if self.report.pairs else self.learned
        """Of each row what a loss is the mean over: its pairs, elsewhere its learned tokens."""

    @property
    def largest_id(self) -> int:
        """Of all tokens."""
        return int(self._ids.max(initial=0))

    def row(self, number: int) -> list[Sample]:
        """The samples that share a row."""
        return [self._sample(member) for member in self._members[self._rows[number] : self._rows[number + 1]]]

    def _sample(self, number: int) -> Sample:
        place = slice(self._starts[number], self._starts[number + 1])
        ids = np.asarray(self._ids[place], dtype=np.int64)
        return Sample(ids, np.where(self._learned[place], ids, IGNORED))


def open_prepared(folder: Path) -> Prepared:
    """What `Writer` made. DataError where it is half made or damaged."""
    try:
        promised = parse_sums((folder / SUMS).read_text(encoding="utf-8"))
        wrong = sorted(name for name, _ in promised.items() ^ sums_of(folder).items())
        if wrong:
            raise DataError(f"{folder}: {wrong[0]} is not what {SUMS} says; the prepared data are damaged")
        return Prepared(folder)
    except FileNotFoundError as error:
        raise DataError(f"{folder}: no prepared data here, or half made ({error.filename} is missing)") from error
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder}: the prepared data cannot be read: {error}") from error


@dataclass
class Writer:
    """Writes samples to a folder as they come; `finish` packs and seals."""

    folder: Path
    max_length: int
    batching: str
    truncated: int = 0
    empty: int = 0
    records: int = 0
    pairs: bool = False
    """Whether each two samples belong together."""
    _lengths: array[int] = field(default_factory=lambda: array("i"))
    _learned: array[int] = field(default_factory=lambda: array("i"))
    _shared: array[int] = field(default_factory=lambda: array("i"))
    _chosen: Sample | None = None
    _streams: list[IO[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._streams = [(self.folder / name).open("wb") for name in (IDS, LEARNED)]

    def add(self, sample: Sample) -> None:
        ids = np.asarray(sample.ids, dtype="<i4")
        mask = np.asarray(sample.labels) != IGNORED
        self._streams[0].write(ids.tobytes())
        self._streams[1].write(mask.astype("u1").tobytes())
        self._lengths.append(len(ids))
        self._learned.append(int(mask[1:].sum()))  # the first token is never predicted
        if self.pairs and self._chosen is None:
            self._chosen = sample
        elif self._chosen is not None:
            self._shared.append(0 if self.batching == "padded" else shared_prefix(self._chosen, sample))
            self._chosen = None

    @property
    def samples(self) -> int:
        return len(self._lengths)

    def finish(self, facts: dict[str, Any]) -> DataReport:
        """Pack, write the rest, seal. `facts` are the report's fields that only the caller knows."""
        for stream in self._streams:
            stream.close()
        lengths = np.asarray(self._lengths, dtype=np.int64)
        held = self._held(lengths)
        rows = self._packed(held)
        self._save("starts", np.concatenate([[0], np.cumsum(lengths)]))
        self._save("counts", self._learned)
        self._save("members", [number for row in rows for number in row])
        self._save("rows", np.concatenate([[0], np.cumsum([len(row) for row in rows])]))
        if self.pairs:
            self._save(SHARED, self._shared)
        tokens = int(lengths.sum()) - sum(self._shared)
        report = DataReport(
            records=self.records,
            empty=self.empty,
            truncated=self.truncated,
            samples=len(lengths),
            tokens=tokens,
            learned_tokens=sum(self._learned),
            rows=len(rows),
            max_length=self.max_length,
            batching=self.batching,
            efficiency=round(tokens / max(1, len(rows) * self.max_length), 4),
            longest=int(held.max(initial=0)),
            attention_span=round(attention_span(lengths, tokens), 3) if len(lengths) else 0.0,
            pairs=len(lengths) // 2 if self.pairs else 0,
            **facts,
        )
        (self.folder / REPORT).write_text(json.dumps(asdict(report), ensure_ascii=False, indent=1) + "\n", "utf-8")
        seal(self.folder)
        return report

    def _held(self, lengths: Any) -> Any:
        """Tokens in a row of each sample, or of each pair; padded, a pair's are two rows."""
        if not self.pairs:
            return lengths
        both = lengths.reshape(-1, 2)
        return 2 * both.max(axis=1, initial=0) if self.batching == "padded" else both.sum(axis=1) - self._shared

    def _packed(self, held: Any) -> list[list[int]]:
        """Sample numbers of each row; a pair stays together."""
        alone = [[number] for number in range(len(held))]
        rows = pack(held.tolist(), self.max_length) if self.batching == "packed" else alone
        return [[2 * n + place for n in row for place in (0, 1)] for row in rows] if self.pairs else rows

    def _save(self, name: str, values: Any) -> None:
        np.save(self.folder / f"{name}.npy", np.asarray(values, dtype=np.int64))


def attention_span(lengths: Any, tokens: int | None = None) -> float:
    """How many tokens attention spans, seen from a token: sum(n * n) / sum(n) over all samples, of n tokens each; of
    samples that share some the `tokens` that there are."""
    return float((lengths**2).sum() / (lengths.sum() if tokens is None else tokens))
