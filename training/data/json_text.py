"""JSON as people write it, read without what Python's reader would let through, and what its values are."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from training.data.sample import BadRecord, DataError

PIECE = 1 << 20
"""Characters read at a time, at least."""
VALUE_LIMIT = 64 * 2**20
"""Characters of one value, as bytes of a line: what is longer is no record."""
UNSEEN = {"Cc", "Cf", "Mn"}
"""Unicode's categories of characters that show nothing by themselves."""
_BLANK = re.compile(r"[ \t\n\r\ufeff]*")
"""Between values; also the byte order mark of a file that was put behind another."""


def json_value(content: bytes) -> Any:
    """The value of a JSON text, or the BadRecord that says why it has none."""
    try:
        return DECODER.decode(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRecord(f"not UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return BadRecord(f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}")
    except (RecursionError, MemoryError):
        return BadRecord("nested too deeply")
    except ValueError as error:  # a number of more digits than Python turns into one, and our own
        return BadRecord(f"not JSON: {error}")


def _finite(text: str) -> float:
    """A number with a fraction or an exponent; Python would also take NaN and Infinity, and make 1e999 the latter."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no JSON value")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of two equal keys JSON would silently keep the last."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return unique


DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique)
"""Refuses what is no JSON, and objects with a key twice. Raises ValueError."""


def parsed(text: str, what: str) -> Any:
    """The value of JSON that stands in a text of a record. Raises BadRecord, as the others below; `what` it is."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{what}: not JSON: {error}") from error
    refuse_unsound(value, what)
    return value


def as_json(value: Any, what: str) -> str:
    """The JSON text of a value of any reader: those of Parquet have dates, decimals and NaN, which JSON has not."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRecord(f"{what} cannot be written as JSON: {error}") from error


def text_of(value: Any, what: str) -> str:
    """The value, which must be text."""
    if not isinstance(value, str):
        raise BadRecord(f"{what} must be text, found {kind_of(value)}")
    return value


def worded(value: Any, what: str) -> str:
    """The value, which must be text with something in it."""
    if not is_worded(text_of(value, what)):
        raise BadRecord(f"{what} is empty")
    return str(value)


def is_worded(text: str) -> bool:
    """Whether it holds a character that can be seen by itself: neither white space nor a mark of format, as U+200B, nor
    a mark on another character, nor what Unicode calls a filler or a blank, as U+3164 and U+2800."""
    letters = (char for char in text if not char.isspace() and unicodedata.category(char) not in UNSEEN)
    return any(not unicodedata.name(char, "").endswith(("FILLER", "BLANK")) for char in letters)


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    return {type(None): "null", dict: "object", str: "text", bool: "true or false", int: "number"}.get(
        type(value), type(value).__name__
    )


def cleaned(value: Any) -> Any:
    """A value of any reader as JSON has it: an object without its nulls, as Arrow fills every object of a column up
    with the keys of all others; a map of Parquet as an object; bytes as the text they are."""
    if isinstance(value, dict):
        return {str(key): cleaned(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        is_map = bool(value) and all(isinstance(inner, tuple) and len(inner) == 2 for inner in value)
        return cleaned(dict(value)) if is_map else [cleaned(inner) for inner in value]
    with suppress(UnicodeDecodeError):
        return value.decode() if isinstance(value, bytes) else value
    return value


def refuse_unsound(value: Any, where: str) -> None:
    """Texts that no tokenizer should see, anywhere in the record."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadRecord(f"{where or 'the text'} holds a NUL character")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise BadRecord(f"{where or 'the text'} holds half of a surrogate pair, or bytes that are not UTF-8")
    elif isinstance(value, dict):
        for key, inner in value.items():
            refuse_unsound(key, f"a key of {where or 'the record'}")
            refuse_unsound(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for place, inner in enumerate(value, start=1):
            refuse_unsound(inner, f"{where} {place}".strip())


class _Text:
    """A file's text from where one is on; more of it is read as it is asked for."""

    def __init__(self, stream: IO[str]) -> None:
        self.text, self.place, self.ended = "", 0, False
        self._stream, self._before = stream, 0

    def more(self) -> None:
        """Drop what lies behind, read at least as much as is left."""
        self._before += self.place
        piece = self._stream.read(max(PIECE, len(self.text) - self.place))
        self.text, self.place, self.ended = self.text[self.place :] + piece, 0, not piece

    def next_mark(self) -> str:
        """The next character that is no white space, which is not taken; empty at the end."""
        while True:
            match = _BLANK.match(self.text, self.place)
            assert match
            self.place = match.end()
            if self.place < len(self.text) or self.ended:
                return self.text[self.place : self.place + 1]
            self.more()

    def value(self) -> Any:
        """The next value, which is taken. ValueError where there is none."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.place)
            except json.JSONDecodeError as error:
                if self.ended or len(self.text) - self.place > VALUE_LIMIT:
                    raise self.wrong(error.msg.removesuffix(" at"), error.pos) from error
            else:
                if end < len(self.text) or self.ended:  # a number at the end of a piece may go on in the next
                    self.place = end
                    return value
            self.more()

    def wrong(self, what: str, place: int | None = None) -> ValueError:
        at = self.place if place is None else place
        return ValueError(f"{what} at character {self._before + at + 1}")


def values(file: Path) -> Iterator[Any]:
    """Each value of a file, or of the array that it holds. DataError where the file is broken, with the reason.

    No more is in memory than one value and a piece behind it. Bytes that are not UTF-8 become half surrogates, so that
    they spoil their own record alone. Not ijson: it takes 4 GB for 40 KB of brackets, and reads half a surrogate pair
    as "?".
    """
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        text = _Text(stream)
        try:
            array = text.next_mark() == "["
            text.place += array
            closed = array and text.next_mark() == "]"
            while not closed and (array or text.next_mark()):
                yield text.value()
                if array:
                    if (mark := text.next_mark()) not in (",", "]"):
                        raise text.wrong("Expecting ',' delimiter")
                    closed = mark == "]"
                    text.place += not closed
                    text.next_mark()
            text.place += closed
            if text.next_mark():
                raise text.wrong("Extra data")
        except (RecursionError, MemoryError) as error:
            raise DataError("nested too deeply") from error
        except ValueError as error:  # also a number of more digits than Python turns into one
            raise DataError(f"not JSON: {error}") from error
