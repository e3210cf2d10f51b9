"""Text files that are not UTF-8: recognised, named with the command that converts them, never guessed at and read."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LINES = 256
"""Lines with letters outside ASCII that are looked at: from there on a file's encoding is plain."""
PIECE = 1 << 16
"""Bytes looked at of one line at most."""
SAMPLE = 1 << 16
"""Bytes that the detector sees."""
FEWEST = 8
"""Bytes outside ASCII that tell an encoding; fewer are a broken line or two."""
FEW = 4
"""The same of a file that is whole or nothing: two Chinese characters."""
EXCERPT = 24
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks. iconv takes them off under these names."""
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


SCRIPTS = {
    "cp949": (r"[\uac00-\ud7a3]", 0.8),
    "cp932": (r"[\u3041-\u30fe]", 0.1),
    "euc_jp": (r"[\u3041-\u30fe]", 0.1),
}
"""Letters without which a text is not in these, and their share at least: Korean is written in Hangul, Japanese not
without kana, while Chinese in GBK, read as either, is mostly ideographs."""
FREQUENT = frozenset(
    "的一是不了人在有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方多经"
    "么去法学如都同现当没动面起看定天分还进好小部其些主样理心本前开但因只从想实日吗吧呢您谢请问什给它与很把客气货退快买钱件色"
)
"""The commonest Chinese characters."""
FREQUENT_SHARE = 0.2
"""Of a text's letters at least, where it is Chinese: of other texts read as GB18030 it is a few in a hundred."""


@dataclass(frozen=True)
class Foreign:
    """What a file is in instead of UTF-8."""

    name: str
    """As iconv takes it; empty where none of those known fits."""
    excerpt: str = ""
    """What some of it says, read so: whoever knows the file sees whether that is right."""
    sure: bool = True
    """By a mark or by zeros; else by what is likely."""

    def sentence(self, file: Path) -> str:
        """What is wrong with the file, and what mends it."""
        if not self.name:
            return f"{file}: not UTF-8, nor any encoding known here; save it as UTF-8"
        command = converted(f"iconv -f {self.name} -t UTF-8", file, "utf8", self.name)
        reads = f", in which {self.excerpt!r} stands there" if self.excerpt else ""
        return f"{file}: not UTF-8; it {'is' if self.sure else 'looks like'} {self.name}{reads}; convert it: {command}"


def converted(command: str, file: Path, made: str, old: str) -> str:
    """What puts a file's conversion into its place, by endings for it and for the old one, which stays under one that
    no folder of data is read by: whoever gives a folder would be refused again, or learn everything twice. `command`:
    what the file's name is put behind, and the conversion comes out of."""
    at, fresh, kept = (shlex.quote(f"{file}{ending}") for ending in ("", f".{made}", f".{old}"))
    return f"{command} {at} > {fresh} && mv {at} {kept} && mv {fresh} {at}"


class EncodingError(ValueError):
    """A text file is not UTF-8; the message names the file, what it is in and what mends it."""


def text_of(file: Path) -> str:
    """The text of a file that is whole or nothing, such as TOML, without the mark that Notepad puts before UTF-8.
    Raises EncodingError, OSError."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        said = (foreign(file, fewest=FEW) or Foreign("")).sentence(file)
        raise EncodingError(said) from None
    if "\0" in text and (found := foreign(file)):
        raise EncodingError(found.sentence(file))
    return text


def foreign(file: Path, fewest: int = FEWEST) -> Foreign | None:
    """What a text file is in; None for UTF-8, with single broken lines in it or without, which have less than `fewest`
    bytes outside ASCII."""
    with file.open("rb") as stream:
        head = stream.read(4096)
    if name := _by_mark(head) or _by_zeros(head):
        return Foreign(name, _excerpt(head, name))
    lines = list(_beyond_ascii(file))
    if not any("\ufffd" in _as_utf8(line) for line in lines):
        return None
    sample = b"".join(line for line in lines if not _speaks_for_utf8(line))[:SAMPLE]
    if _is_utf8(lines) or sum(byte > 127 for byte in sample) < fewest:
        return None
    return _detected(file, sample)


def _by_mark(head: bytes) -> str:
    return next((name for mark, name in MARKS.items() if head.startswith(mark)), "")


def _by_zeros(head: bytes) -> str:
    """UTF-16 and UTF-32 without a mark: JSON and tables begin with ASCII, whose other bytes are zeros there."""
    zeros = [len(head) >= 8 and not any(head[place:8:4]) for place in range(4)]
    patterns = {
        (False, True, True, True): "UTF-32LE",
        (True, True, True, False): "UTF-32BE",
        (False, True, False, True): "UTF-16LE",
        (True, False, True, False): "UTF-16BE",
    }
    return patterns.get((zeros[0], zeros[1], zeros[2], zeros[3]), "")


def _beyond_ascii(file: Path) -> Iterator[bytes]:
    """The first lines that have letters outside ASCII, long ones cut."""
    found, begins = 0, True
    with file.open("rb") as stream:
        while found < LINES and (line := stream.readline(PIECE)):
            if begins and not line.isascii():
                found += 1
                yield line
            begins = line.endswith(b"\n")


def _is_utf8(lines: Sequence[bytes]) -> bool:
    """Whether these, some of them broken, are UTF-8 all the same: ten to one tell another encoding, and more than half
    do where all of them together are Chinese, as short words in GBK are UTF-8 by chance."""
    good = sum(_speaks_for_utf8(line) for line in lines)
    wrong = sum(not _is_mostly_utf8(line) for line in lines)
    if wrong > 10 * good:
        return False
    return len(lines) <= 2 * good or not _is_chinese(lines)


def _speaks_for_utf8(line: bytes) -> bool:
    """Not where it could be Chinese in GBK as well."""
    return _is_mostly_utf8(line) and not _is_chinese([line])


def _is_mostly_utf8(line: bytes) -> bool:
    """Whether more of its letters outside ASCII are UTF-8 than not: a broken line is, one in GBK is not."""
    text = _as_utf8(line)
    wrong = text.count("\ufffd")
    return sum(not char.isascii() for char in text) - wrong >= wrong


def _as_utf8(line: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(line)  # not final: it may be cut within a letter


def _detected(file: Path, sample: bytes) -> Foreign:
    try:
        from charset_normalizer import from_bytes
    except ImportError:  # of a bare Python: it is one of the packages of both sides
        return Foreign("")
    whole_lines = sample[: sample.rfind(b"\n") + 1] or sample
    codec = "gb18030" if _is_chinese([whole_lines]) else ""
    if not codec:  # which goes by frequency too, and is lost where there are a few words
        likely = from_bytes(whole_lines, cp_isolation=list(CANDIDATES))
        codec = next((one.encoding for one in likely if _is_in_its_script(one.encoding, str(one))), "")
    if not codec:
        return Foreign("")
    name = CANDIDATES.get(codec, codec)
    if name == "GB18030" and _is_whole(file, "gbk"):  # its larger successor: people know it by the older name
        name = "GBK"
    return Foreign(name, _excerpt(sample, codec), sure=False)


def _is_chinese(lines: Sequence[bytes]) -> bool:
    """Whether they are GB18030 by the characters that would stand there."""
    try:
        text = "".join(codecs.getincrementaldecoder("gb18030")().decode(line) for line in lines)
    except UnicodeDecodeError:
        return False
    letters = [char for char in text if char.isalpha() and not char.isascii()]
    return sum(char in FREQUENT for char in letters) >= max(1, FREQUENT_SHARE * len(letters))


def _is_in_its_script(codec: str, text: str) -> bool:
    if codec not in SCRIPTS:
        return True
    letters, share = SCRIPTS[codec]
    return len(re.findall(letters, text)) >= share * sum(char.isalpha() and not char.isascii() for char in text)


def _is_whole(file: Path, codec: str) -> bool:
    decoder = codecs.getincrementaldecoder(codec)()
    try:
        with file.open("rb") as stream:
            while piece := stream.read(PIECE):
                decoder.decode(piece)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _excerpt(sample: bytes, codec: str) -> str:
    """The first letters outside ASCII, from the beginning of their word, with some behind them."""
    text = codecs.getincrementaldecoder(codec)("replace").decode(sample)
    text = text.removeprefix("\ufeff")
    start = next((place for place, char in enumerate(text) if not char.isascii()), 0)
    start -= len(re.split(r'[\s",]', text[:start])[-1])
    return re.split(r'["\n\t]', text[start : start + EXCERPT])[0].strip()
