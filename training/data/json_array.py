"""The values of a JSON array one after another: never more of a file in memory than one value and a piece behind it."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from training.data.json_text import DECODER
from training.data.sample import DataError

PIECE = 1 << 20
"""Bytes read at a time, at least."""
VALUE_LIMIT = 64 * 2**20
"""Characters of one value, as bytes of a line: what is longer is no record."""
_BLANK = re.compile(r"[ \t\n\r]*")


class _Text:
    """A file's text from where one is on; more of it is read as it is asked for."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.text, self.place, self.ended = "", 0, False
        self._stream, self._before, self._bytes = stream, 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def more(self) -> None:
        """Drop what lies behind, read at least as much as is left."""
        self._before += self.place
        piece = self._stream.read(max(PIECE, len(self.text) - self.place))
        waiting = len(self._decoder.getstate()[0])  # of a letter that the piece before ended in
        try:
            self.text = self.text[self.place :] + self._decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 at byte {self._bytes - waiting + error.start + 1}") from error
        self._bytes += len(piece)
        self.place, self.ended = 0, not piece

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
        return ValueError(f"not JSON: {what} at character {self._before + at + 1}")


def values(file: Path) -> Iterator[Any]:
    """Each value of the array that a file holds. DataError where it is none, or broken: with what is wrong there."""
    with file.open("rb") as stream:
        text = _Text(stream)
        try:
            if (first := text.next_mark()) != "[":
                found = type(text.value()).__name__ if first else "nothing"
                raise DataError(f"{file}: an array of records is expected, found {found}")
            yield from _values(text)
        except (RecursionError, MemoryError) as error:
            raise DataError(f"{file}: nested too deeply") from error
        except ValueError as error:  # also a number of more digits than Python turns into one
            if isinstance(error, DataError):
                raise
            said = str(error)
            raise DataError(f"{file}: {said if said.startswith('not ') else f'not JSON: {said}'}") from error


def _values(text: _Text) -> Iterator[Any]:
    text.place += 1
    closed = text.next_mark() == "]"
    while not closed:
        yield text.value()
        mark = text.next_mark()
        if mark not in (",", "]"):
            raise text.wrong("Expecting ',' delimiter")
        closed = mark == "]"
        text.place += not closed
        text.next_mark()
    text.place += 1
    if text.next_mark():
        raise text.wrong("Extra data")
