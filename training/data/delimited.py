"""Rows of CSV and TSV files as records: the first line names the columns, each row is a record. Standard library."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from training.data.sample import BadRecord, DataError
from training.data.shapes import is_known, known_shapes
from training.text.counts import many

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""By suffix."""
FIELD_LIMIT = 64 * 2**20
"""Bytes of one line and characters of one field, as of a line of JSON."""


def rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Each row under the file's header, by the line that it begins in. DataError where that names no known columns."""
    csv.field_size_limit(FIELD_LIMIT)
    with file.open("rb") as stream:
        # a byte that is not UTF-8 spoils its own row alone: it is carried through as half a surrogate pair
        stream.seek(len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0)
        lines = (line.decode("utf-8", "surrogateescape") for line in iter(lambda: stream.readline(FIELD_LIMIT), b""))
        first = next(lines, "")
        reader = csv.reader(chain([first], lines), delimiter=_delimiter(file, first), strict=True)
        header = _header(reader)
        while True:
            place = f"line {reader.line_num + 1}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield place, BadRecord(f"not {file.suffix[1:].upper()}: {error}")
                continue
            if fields:
                yield place, _record(header, fields)


def _delimiter(file: Path, first: str) -> str:
    """What separates the columns that line 1 names; by the file's name where no sign makes known ones of them."""
    own = DELIMITERS[file.suffix.lower()]
    return next((s for s in (own, ",", ";", "\t") if is_known([n.strip().strip('"') for n in first.split(s)])), own)


def _header(reader: Iterator[list[str]]) -> list[str]:
    try:
        names = [name.strip() for name in next(reader, [])]
        refuse_repeated(list(filter(None, names)))
    except (csv.Error, BadRecord) as error:
        raise DataError(f"line 1, which should name the columns, cannot be read: {error}") from error
    if not is_known(names):
        raise DataError(f"its header is {', '.join(names)}; spotune needs the columns of {known_shapes()}")
    return names


def refuse_repeated(names: Sequence[str]) -> None:
    """BadRecord where two columns have one name."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRecord(f"it names the column {twice!r} twice")


def _record(header: Sequence[str], fields: Sequence[str]) -> Mapping[str, Any] | BadRecord:
    """A row by its columns; empty fields are absent."""
    if wrong := next((name for name, text in zip(header, fields, strict=False) if _is_broken(text)), ""):
        return BadRecord(f"not UTF-8 in the column {wrong}")
    if len(fields) != len(header):
        return BadRecord(f"{many(len(fields), 'field')}, but line 1 names {many(len(header), 'column')}")
    return {name: text for name, text in zip(header, fields, strict=True) if name and text}


def _is_broken(text: str) -> bool:
    return not text.isascii() and any("\udc80" <= char <= "\udcff" for char in text)
