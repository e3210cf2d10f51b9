"""Text files that are not UTF-8: the encoding that they look like and the command that converts them. None is read by
a guess."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LINES = 256
"""Lines with letters outside ASCII that are looked at."""
PIECE = 1 << 16
"""Bytes looked at of one line at most, and of all of them by the detector."""
FEWEST = 4
"""Bytes outside ASCII that tell an encoding: two Chinese characters. Fewer are a broken line."""
EXCERPT = 24
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks. iconv takes them off under these names."""
ZEROS = {
    (False, True, True, True): "UTF-32LE",
    (True, True, True, False): "UTF-32BE",
    (False, True, False, True): "UTF-16LE",
    (True, False, True, False): "UTF-16BE",
}
"""Which of each four bytes are zeros in text without a mark: JSON and tables begin with ASCII."""
CANDIDATES = {
    "gb18030": "GB18030",
    "big5": "BIG5",
    "big5hkscs": "BIG5-HKSCS",
    "cp932": "CP932",
    "euc_jp": "EUC-JP",
    "cp949": "CP949",
    "cp1252": "CP1252",
    "cp1251": "CP1251",
    "koi8_r": "KOI8-R",
}
"""Python's names of what people's files are in besides UTF-8, and iconv's."""


@dataclass(frozen=True)
class Foreign:
    """What a file is in instead of UTF-8."""

    name: str
    """As iconv takes it; empty where none of those known fits."""
    excerpt: str = ""
    """What some of it says, read so: whoever knows the file sees whether that is right."""
    others: tuple[str, ...] = ()
    """What it might be as well: a few words fit several."""

    def sentence(self, file: Path) -> str:
        """What is wrong with the file, and the command that converts it in its place; the old file stays beside it,
        under an ending that no folder of data is read by."""
        if not self.name:
            return f"{file}: not UTF-8, nor any encoding known here; save it as UTF-8"
        at, fresh, kept = (shlex.quote(f"{file}{ending}") for ending in ("", ".utf8", f".{self.name}"))
        command = f"iconv -f {self.name} -t UTF-8 {at} > {fresh} && mv {at} {kept} && mv {fresh} {at}"
        name = " or ".join((self.name, *self.others))
        reads = f", in which {self.excerpt!r} stands there" if self.excerpt else ""
        return f"{file}: not UTF-8; it looks like {name}{reads}; convert it: {command}"


class EncodingError(ValueError):
    """A text file is not UTF-8; the message names the file, what it is in and the command that converts it."""


def text_of(file: Path) -> str:
    """The text of a file that is whole or nothing, such as TOML, without the mark that Notepad puts before UTF-8.
    Raises EncodingError, OSError."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise EncodingError((foreign(file) or Foreign("")).sentence(file)) from None
    if "\0" in text and (found := foreign(file)):
        raise EncodingError(found.sentence(file))
    return text


def foreign(file: Path) -> Foreign | None:
    """What a text file is in; None for UTF-8, also where less than half of its lines are broken."""
    with file.open("rb") as stream:
        head = stream.read(4096)
    zeros = [len(head) >= 8 and not any(head[place:8:4]) for place in range(4)]
    marked = next((name for mark, name in MARKS.items() if head.startswith(mark)), "")
    if name := marked or ZEROS.get((zeros[0], zeros[1], zeros[2], zeros[3]), ""):
        return Foreign(name, _excerpt(head, name))
    lines = list(_beyond_ascii(file))
    broken = [line for line in lines if _is_broken(line)]
    sample = b"".join(broken)[:PIECE]
    several = sum(byte > 127 for byte in sample) >= FEWEST and 2 * len(broken) >= len(lines)
    return _detected(file, b"".join(lines)[:PIECE]) if several else None


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


def _detected(file: Path, sample: bytes) -> Foreign:
    try:
        from charset_normalizer import from_bytes
    except ImportError:  # of a bare Python: it is one of the packages of both sides
        return Foreign("")
    whole_lines = sample[: sample.rfind(b"\n") + 1] or sample
    guesses = {one.encoding: str(one) for one in from_bytes(whole_lines, cp_isolation=list(CANDIDATES))}
    if not guesses:
        return Foreign("")
    # a few Chinese words fit Korean and Japanese too: as ideographs, and without kana
    own, best = guesses.get("gb18030", "\u3041"), next(iter(guesses.values()))
    chinese = re.search("[\u4e00-\u9fff]", best) and not re.search("[\u3041-\u30fe]", own)
    first, *others = sorted(guesses, key=lambda codec: codec != "gb18030") if chinese else guesses
    try:
        name = "GBK" if first == "gb18030" and file.read_bytes().decode("gbk") else CANDIDATES.get(first, first)
    except UnicodeDecodeError:  # its larger successor: people know it by the older name
        name = CANDIDATES[first]
    return Foreign(name, _excerpt(sample, first), tuple(CANDIDATES.get(other, other) for other in others[:1]))


def _excerpt(sample: bytes, codec: str) -> str:
    """The first letters outside ASCII, from the beginning of their word, with some behind them."""
    text = codecs.getincrementaldecoder(codec)("replace").decode(sample)
    text = text.removeprefix("\ufeff")
    start = next((place for place, char in enumerate(text) if not char.isascii()), 0)
    start -= len(re.split(r'[\s",]', text[:start])[-1])
    return re.split(r'["\n\t]', text[start : start + EXCERPT])[0].strip()
