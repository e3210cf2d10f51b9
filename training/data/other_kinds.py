"""Files that are not what is read: no text, whatever their names end in, recognised by their first bytes; or text that
is not UTF-8. What to do with them is said."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from training.data.sample import DataError
from training.encoding import foreign

WORKBOOK = "an Excel workbook: save the sheet as CSV UTF-8 in Excel or WPS, and give that"
DOCUMENT = "a Word document: put the records into JSONL or CSV, and give that"
ARCHIVE = "a zip archive: unpack it, and give what is inside"
PARQUET = "Parquet: rename it, so that it ends in .parquet"
KINDS: Mapping[bytes, str] = {
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an Office file of the old kind (.xls, .doc), or one with a password: save it "
    "as CSV UTF-8, and give that",
    b"%PDF-": "a PDF: put the records into JSONL or CSV, and give that",
    b"\x1f\x8b": "packed with gzip: unpack it (gzip -d), and give what is inside",
    b"\x28\xb5\x2f\xfd": "packed with zstd: unpack it (zstd -d), and give what is inside",
    b"\xfd7zXZ\x00": "packed with xz: unpack it (xz -d), and give what is inside",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it, and give what is inside",
    b"Rar!\x1a\x07": "a RAR archive: unpack it, and give what is inside",
    b"PAR1": PARQUET,
}
"""What a file is that begins with these bytes."""
ZIP = b"PK\x03\x04"
INSIDE: Mapping[str, str] = {"xl/": WORKBOOK, "word/": DOCUMENT}
"""What a zip archive is that has a folder of this name."""


def refuse_other_kind(file: Path) -> None:
    """DataError where a file is none of the kinds that are read, though it may be called like one."""
    try:
        what = other_kind(file)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from error
    if what:
        raise DataError(f"{file}: {what}")


def refuse_foreign(file: Path) -> None:
    """DataError where a text file as a whole is not UTF-8. Single lines that are not are bad records."""
    if found := foreign(file):
        raise DataError(found.sentence(file))


def other_kind(file: Path) -> str:
    """What a file is instead of text, and what to do with it; empty where nothing says that it is no text, and for
    Parquet under its own name."""
    with file.open("rb") as stream:
        head = stream.read(max(map(len, KINDS)))
    if head.startswith(ZIP):
        return _of_zip(file)
    what = next((what for mark, what in KINDS.items() if head.startswith(mark)), "")
    return "" if what == PARQUET and file.suffix.lower() == ".parquet" else what


def _of_zip(file: Path) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return ARCHIVE
    return next((what for folder, what in INSIDE.items() if any(n.startswith(folder) for n in names)), ARCHIVE)
