"""Text files must be UTF-8. Any other file is refused with the encoding that charset-normalizer finds most likely and
the command that converts it. No file is read by a guess."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Iterator
from pathlib import Path

LINES = 256
"""Lines outside ASCII that are looked at."""
PIECE = 1 << 16
"""Bytes looked at, of one line and of the whole sample."""
FEWEST = 4
"""Bytes outside ASCII that tell an encoding: two Chinese characters. Fewer are a broken line."""
CANDIDATES = (
    *("GB18030", "BIG5", "CP932", "EUC-JP", "CP949", "CP1250", "CP1251", "CP1252", "KOI8-R"),
    *("UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32", "UTF-32LE", "UTF-32BE"),
)
"""Encodings that Python and iconv know by the same name."""


class EncodingError(ValueError):
    """A text file is not UTF-8; the message names the file, its likely encoding and the command that converts it."""


def text_of(file: Path) -> str:
    """The text of a small file such as TOML, without a byte order mark. Raises EncodingError, OSError."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise EncodingError(refusal(file, foreign_sample(file) or b"")) from None
    if "\0" in text and (sample := foreign_sample(file)):
        raise EncodingError(refusal(file, sample))
    return text


def foreign_sample(file: Path) -> bytes | None:
    """Some bytes of a text file that is not UTF-8; None for UTF-8, also with less than half of the lines broken."""
    with file.open("rb") as stream:
        head = stream.read(PIECE)
    if 0 < len(head) <= 4 * head.count(0):
        return head
    lines = list(_beyond_ascii(file))
    broken = [line for line in lines if _is_broken(line)]
    few = sum(byte > 127 for byte in b"".join(broken)[:PIECE]) < FEWEST
    return None if few or 2 * len(broken) < len(lines) else b"".join(lines)[:PIECE]


def refusal(file: Path, sample: bytes) -> str:
    """What is wrong with the file, and the command that converts it in its place. The old file stays beside it, with an
    ending that is not read as data."""
    from charset_normalizer import from_bytes

    guesses = from_bytes(sample, cp_isolation=list(CANDIDATES)) if sample else ()
    names = {codecs.lookup(name).name: name for name in CANDIDATES}
    if not (found := [names[codecs.lookup(guess.encoding).name] for guess in guesses]):
        return f"{file}: not UTF-8, and its encoding is not recognised; save it as UTF-8"
    name = found[0]
    also = f" ({' and '.join(found[1:3])} would fit too)" if found[1:] else ""
    at, fresh, kept = (shlex.quote(f"{file}{ending}") for ending in ("", ".utf8", f".{name}"))
    command = f"iconv -f {name} -t UTF-8 {at} > {fresh} && mv {at} {kept} && mv {fresh} {at}"
    return f"{file}: not UTF-8; it looks like {name}{also}; convert it, then check that it reads well: {command}"


def _beyond_ascii(file: Path) -> Iterator[bytes]:
    """The first lines that have letters outside ASCII, long ones cut."""
    found, begins = 0, True
    with file.open("rb") as stream:
        while found < LINES and (line := stream.readline(PIECE)):
            if begins and not line.isascii():
                found += 1
                yield line
            begins = line.endswith(b"\n")


def _is_broken(line: bytes) -> bool:
    """Whether half of its letters outside ASCII are not UTF-8; the last may be cut."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(line)
    return 2 * text.count("\ufffd") >= sum(not char.isascii() for char in text)
