"""The JSON values of a file, of an array its elements, one after another: never more in memory than one value and a
piece behind it. Bytes that are not UTF-8 become half surrogates, so that they spoil their own record alone.

Not ijson: it keeps a path for each level, 4 GB for 40 KB of brackets, and reads half a surrogate pair as "?".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from training.data.json_text import DECODER
from training.data.sample import DataError

PIECE = 1 << 20
"""Characters read at a time, at least."""
VALUE_LIMIT = 64 * 2**20
"""Characters of one value, as bytes of a line: what is longer is no record."""
_BLANK = re.compile(r"[ \t\n\r]*")


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
    """Each value of a file, or of the array that it holds. DataError where it is broken, with what is wrong there."""
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        text = _Text(stream)
        try:
            if text.next_mark() == "[":
                yield from _elements(text)
                if text.next_mark():
                    raise text.wrong("Extra data")
            while text.next_mark():
                yield text.value()
        except (RecursionError, MemoryError) as error:
            raise DataError(f"{file}: nested too deeply") from error
        except ValueError as error:  # also a number of more digits than Python turns into one
            raise DataError(f"{file}: not JSON: {error}") from error


def _elements(text: _Text) -> Iterator[Any]:
    text.place += 1
    closed = text.next_mark() == "]"
    while not closed:
        yield text.value()
        if (mark := text.next_mark()) not in (",", "]"):
            raise text.wrong("Expecting ',' delimiter")
        closed = mark == "]"
        text.place += not closed
        text.next_mark()
    text.place += 1
