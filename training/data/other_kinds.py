"""Files that are not what is read: no text, whatever their names end in, by their first bytes; or text that is not
UTF-8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from training.data.sample import DataError
from training.encoding import foreign_sample, refusal

OFFICE = "an Office file (.xls, .doc, or one with a password); save it as CSV UTF-8"
PACKED = "packed with {}; unpack it"
KINDS: Mapping[bytes, str] = {
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": OFFICE,
    b"PK\x03\x04": "an Office file (.xlsx, .docx) or a zip archive; save it as CSV UTF-8, or unpack it",
    b"%PDF-": "a PDF; put the records into JSONL or CSV",
    b"\x1f\x8b": PACKED.format("gzip"),
    b"\x28\xb5\x2f\xfd": PACKED.format("zstd"),
    b"\xfd7zXZ\x00": PACKED.format("xz"),
    b"7z\xbc\xaf\x27\x1c": PACKED.format("7z"),
    b"Rar!\x1a\x07": PACKED.format("RAR"),
    b"PAR1": "Parquet; rename it, so that it ends in .parquet",
    b"ARROW1": "Arrow; rename it, so that it ends in .arrow",
}
"""What a file is that begins with these bytes, and what to do."""


def refuse_other_kind(file: Path) -> None:
    """DataError where a file is none of the kinds that are read, though it may be called like one."""
    try:
        with file.open("rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from error
    what = next((what for mark, what in KINDS.items() if head.startswith(mark)), "")
    if what and not what.endswith(f"ends in {file.suffix.lower()}"):
        raise DataError(f"{file}: {what}")


def refuse_foreign(file: Path) -> None:
    """DataError where a text file as a whole is not UTF-8. Single lines that are not are bad records."""
    if sample := foreign_sample(file):
        raise DataError(refusal(file, sample))
