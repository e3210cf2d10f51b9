"""Records from files: JSONL, JSON, CSV, TSV, Parquet, Arrow, or a folder of these. No file is held whole."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from training.data.delimited import DELIMITERS, refuse_repeated, rows
from training.data.json_text import json_value, values
from training.data.sample import Bad, BadRecord, DataError
from training.data.shapes import KNOWN_KEYS, Record, Shape, recognised
from training.data.source import Data, DataFile, other_kind
from training.data.splits import COLUMNS, PARQUET
from training.text.problems import encoding_fault, foreign_sample

LINE_LIMIT = 64 * 2**20
"""Bytes of one line: longer ones are no record, and reading one whole could take all memory."""
Raw = tuple[str, Any]
"""Where ("line 3") and what: the parsed value, or the BadRecord it gave."""
TOGETHER = 256
"""Records of a piece, which is worked on at once."""


@dataclass(frozen=True)
class DataSummary:
    """What checked data hold."""

    records: int
    shape: Shape
    bad: int = 0
    """Left out, where that was asked for."""


def check(data: Data, skip_bad: bool = False, cure: str = "") -> DataSummary:
    """Read every record. DataError names the first bad ones and their `cure`; with `skip_bad` they are
    counted instead. Nothing is tokenised."""
    bad = Bad(skip_bad, cure=cure)
    count = 0
    shape: Shape | None = None
    for _, record in records(data, bad):
        shape = record.shape
        count += 1
    bad.refuse(count)
    if shape is None:
        raise none_in(data, bad)
    return DataSummary(count, shape, bad.count)


def none_in(data: Data, bad: Bad) -> DataError:
    """What is said of data without a record that can be used."""
    but = f" but {bad.count} bad: {bad.shown[0]}" if bad.count else ""
    return DataError(f"{data.name}: no record in it{but}")


def records(data: Data, bad: Bad) -> Iterator[tuple[str, Record]]:
    """Each good record with its place, all of one shape; the others go to `bad`."""
    shape: Shape | None = None
    good = 0
    for where, value in raws(data.files):
        try:
            record = recognised(value)
        except BadRecord as error:
            bad.add(where, str(error))
            continue
        if shape not in {None, record.shape}:
            bad.refuse(good)
            raise DataError(mixed(where, record.shape, shape))
        shape, good = record.shape, good + 1
        yield where, record


def mixed(where: str, shape: str, before: str | None) -> str:
    """What is said of a record that has another shape than those before."""
    return f"{where}: {shape}, but the records before are {before}"


def raws(files: Iterable[DataFile]) -> Iterator[Raw]:
    """All that the files hold, with its place: "a.jsonl line 3"."""
    return ((f"{file.name} {place}", value) for file in files for place, value in raw(file))


def together(raws: Iterable[Raw], most: int | None = None) -> Iterator[list[Raw]]:
    """Piece after piece, of `most` records each at most; where nothing more can be read, its DataError stands last, in
    place of a value."""

    def to_the_end() -> Iterator[Raw]:
        try:
            yield from raws
        except DataError as error:
            yield "", error

    left = to_the_end()
    while piece := list(islice(left, min(most or TOGETHER, TOGETHER))):
        yield piece


def raw(file: DataFile) -> Iterator[Raw]:
    """All that a file holds, one place after another. DataError where it cannot be read as what it is."""
    path, name = file
    try:
        if path.stat().st_size == 0:
            raise DataError("the file is empty")
        if other := other_kind(path):
            raise DataError(other)
        if path.suffix.lower() in COLUMNS:
            yield from _columns(path)
            return
        if sample := foreign_sample(path):
            raise DataError(encoding_fault(sample, path if name == str(path) else None))
        if path.suffix.lower() in DELIMITERS:
            yield from rows(path)
        elif _is_lines(path):
            yield from _json_lines(path)
        else:
            yield from ((f"record {number}", value) for number, value in enumerate(values(path), start=1))
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}") from error
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def _is_lines(file: Path) -> bool:
    """Whether a record stands on each line of a JSON file, whatever its name: neither in an array, nor over lines."""
    with file.open("rb") as stream:
        lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in iter(lambda: stream.readline(LINE_LIMIT), b""))
        first = next(filter(None, lines), b"")
    if first.startswith(b"["):
        return False
    try:
        return not isinstance(json_value(first), BadRecord) or not isinstance(next(values(file), None), dict)
    except DataError:
        return True  # the first line is broken, as others may be


def _json_lines(file: Path) -> Iterator[Raw]:
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(LINE_LIMIT + 1):
            number += 1
            if len(line) > LINE_LIMIT and not line.endswith(b"\n"):
                while (rest := stream.readline(LINE_LIMIT)) and not rest.endswith(b"\n"):
                    pass
                yield f"line {number}", BadRecord(f"longer than {LINE_LIMIT // 2**20} MiB")
            elif (content := line.removeprefix(codecs.BOM_UTF8)).strip():
                yield f"line {number}", json_value(content)


def _columns(file: Path) -> Iterator[Raw]:
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        raise DataError("reading Parquet and Arrow needs pyarrow, which this Python lacks") from error
    row = 0
    try:
        for batch in _batches(file):
            refuse_repeated(batch.schema.names)
            for place in range(batch.num_rows):
                row += 1
                yield f"row {row}", _row(batch, place)
    except (ArrowException, ValueError, KeyError, OSError) as error:
        kind = file.suffix[1:].capitalize()
        raise DataError(f"not readable as {kind} after row {row}: {str(error).splitlines()[0]}") from error


def _batches(file: Path) -> Iterator[Any]:
    from pyarrow import ipc, memory_map, parquet

    if file.suffix.lower() == PARQUET:
        with parquet.ParquetFile(file, page_checksum_verification=True) as table:
            yield from table.iter_batches(batch_size=256)
        return
    with memory_map(str(file)) as mapped:
        if mapped.read(6) == b"ARROW1":
            batches = ipc.open_file(mapped)
            yield from (batches.get_batch(number) for number in range(batches.num_record_batches))
        else:
            mapped.seek(0)
            yield from ipc.open_stream(mapped)


def _row(batch: Any, place: int) -> Any:
    """A row by its columns. Of those that no record is read from, only whether they hold a value: Python has not all
    the dates that Arrow has."""
    cells = zip(batch.schema.names, [column[place] for column in batch.columns], strict=True)
    try:
        return {name: cell.as_py() if name in KNOWN_KEYS else cell.is_valid or None for name, cell in cells}
    except UnicodeDecodeError as error:
        return BadRecord(f"not UTF-8 at byte {error.start + 1} of a text")
    except (ValueError, OverflowError) as error:
        return BadRecord(f"a value of it cannot be read: {error}")
