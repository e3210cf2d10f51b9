"""Records from files: JSONL, JSON, CSV, TSV, Parquet, Arrow, or a folder of these. No file is held whole."""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from training.data import splits
from training.data.delimited import DELIMITERS, refuse_repeated, rows
from training.data.hub import HubDataSet, on_hub
from training.data.json_text import json_value, values
from training.data.sample import Bad, BadRecord, DataError
from training.data.shapes import KNOWN_KEYS, Record, Shape, recognised
from training.data.splits import ARROW, COLUMNS, NO_DATA, PARQUET, SUFFIXES
from training.text.files import sha256_of
from training.text.problems import foreign_sample, refusal

MAGIC = {
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an Office file",
    b"PK\x03\x04": "an Office file or a zip archive",
    b"%PDF-": "a PDF",
    b"\x1f\x8b": "packed with gzip",
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"\xfd7zXZ\x00": "packed with xz",
    b"7z\xbc\xaf\x27\x1c": "packed with 7z",
    b"Rar!\x1a\x07": "packed with RAR",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
}
"""What a file is that begins with these bytes, whatever its name ends in."""
LINE_LIMIT = 64 * 2**20
"""Bytes of one line: longer ones are no record, and reading one whole could take all memory."""
Source = Path | tuple[Path, ...]
"""A file or a folder of them; or several, one after another."""
Raw = tuple[str, Any]
"""Where ("line 3") and what: the parsed value, or the BadRecord it gave."""
TOGETHER = 256
"""Records of a piece, which is worked on at once."""


@dataclass(frozen=True)
class DataSummary:
    """What checked data hold."""

    records: int
    shape: Shape
    sha256: str
    bad: int = 0
    """Left out, where that was asked for."""


def check(source: Source, skip_bad: bool = False, cure: str = "") -> DataSummary:
    """Read every record of `source`. DataError names the first bad ones and their `cure`; with `skip_bad` they are
    counted instead. Nothing is tokenised."""
    bad = Bad(skip_bad, cure=cure)
    count = 0
    shape: Shape | None = None
    for _, record in records(source, bad):
        shape = record.shape
        count += 1
    bad.refuse(count)
    if shape is None:
        raise none_in(source, bad)
    return DataSummary(count, shape, data_sha256(source), bad.count)


def none_in(source: Source, bad: Bad) -> DataError:
    """What is said of data without a record that can be used."""
    but = f" but {bad.count} bad: {bad.shown[0]}" if bad.count else ""
    return DataError(f"{called(source)}: no record in it{but}")


def given(data: Sequence[str]) -> Source | HubDataSet | None:
    """What `--data` says; None where it is not there. DataError for an empty name, which would be the folder one is in,
    and for a data set of the Hub beside others."""
    if "" in data:
        raise DataError("--data: an empty name is no file")
    if dataset := next(filter(None, map(on_hub, data)), None):
        if len(data) > 1:
            raise DataError(f"--data {dataset}: a data set of the Hub is taken alone, without other --data")
        return dataset
    paths = tuple(map(Path, data))
    return paths if len(paths) > 1 else next(iter(paths), None)


def called(source: Source) -> str:
    """What data are called in a sentence."""
    return ", ".join(map(str, source)) if isinstance(source, tuple) else str(source)


def can_check_here(source: Source) -> bool:
    """Whether this machine has what reading `source` takes: Parquet and Arrow need pyarrow."""
    return importlib.util.find_spec("pyarrow") is not None or not any(
        file.suffix.lower() in COLUMNS for file in data_files(source)
    )


def data_files(source: Source) -> list[Path]:
    """The files to read, in order. DataError where there is none, one of no known kind, or one of several twice."""
    if not isinstance(source, tuple):
        return _files_in(source)
    files = [file for each in source for file in _files_in(each)]
    places = Counter(file.resolve() for file in files)
    if twice := next((file for file in files if places[file.resolve()] > 1), None):
        raise DataError(f"{twice} is given twice: say it once")
    return files


def placed(source: Source, place: str) -> dict[str, Path | str]:
    """A file or a folder's files by their places on the head, at `place`; several below it, read in their order there.
    DataError where there is none, or one twice."""
    if isinstance(source, tuple):
        data_files(source)
        width = len(str(len(source)))
        each = [placed(path, f"{place}/{number:0{width}}-{path.name}") for number, path in enumerate(source, start=1)]
        return {at: file for some in each for at, file in some.items()}
    if not source.is_dir():
        return {place: source}
    return {f"{place}/{file.relative_to(source)}": file for file in data_files(source)}


def _files_in(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for file in _of_training(path) if file.suffix.lower() in SUFFIXES and file.name not in NO_DATA]
        if not files:
            raise DataError(f"{path}: no {splits.kinds()} file in this folder")
        return files
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    if path.suffix.lower() not in SUFFIXES:
        _refuse_other_kind(path)
        raise DataError(f"{path}: {path.suffix or 'no suffix'} is no known kind of data; {splits.kinds()} are")
    return [path]


def _of_training(folder: Path) -> list[Path]:
    """The visible files of a folder in the order of their names, which the head reads them in too: of save_to_disk
    those of the training split that its state counts, beside a README with configurations those to train on, else all.
    DataError where several could be meant."""
    if (folder / splits.OF_SPLITS).is_file():
        names = [str(name) for name in _listed(folder / splits.OF_SPLITS, "splits")]
        training = splits.training_splits(names)
        if len(training) != 1:
            raise DataError(f"{folder}: its splits are {splits.some(names) or 'not named'}: name one, {folder}/SPLIT")
        folder /= training[0]
    files = _visible(folder)
    if configs := _configs(folder / "README.md"):
        try:
            chosen = splits.chosen_files([file.relative_to(folder).as_posix() for file in files], configs)
        except DataError as error:
            raise DataError(f"{folder}: {error}") from error
        return sorted(folder / name for name in chosen)
    for state in (file for file in files if file.name == splits.STATE):
        if lacking := [name for name in _counted(state) if not (state.parent / name).is_file()]:
            raise DataError(f"{state}: the files of this data set are not all here: {splits.some(lacking)} missing")
    return [file for file in files if file.suffix.lower() != ARROW or _is_counted(file)]


def _configs(readme: Path) -> Any:
    """The configurations that a data set's README names, as the Hub has them; none where its metadata cannot be read:
    a README beside one's own data need not be written for the Hub."""
    if not readme.is_file():
        return None
    from huggingface_hub import metadata_load

    try:
        return (metadata_load(readme) or {}).get("configs")
    except Exception:  # what is no YAML raises errors that have no base in common
        return None


def _is_counted(file: Path) -> bool:
    """Whether a file of Arrow is data: datasets leaves old shards and its cached copies beside them."""
    counted = _counted(file.with_name(splits.STATE))
    return file.name in counted if counted else not file.name.startswith("cache-")


def _counted(state: Path) -> list[str]:
    """The names of the files of a saved data set."""
    return [str(each.get("filename")) for each in _listed(state, "_data_files") if isinstance(each, dict)]


def _listed(file: Path, key: str) -> list[Any]:
    """The list under a key of a file of save_to_disk; an empty one where there is none."""
    value = json_value(file.read_bytes()) if file.is_file() else None
    listed = value.get(key) if isinstance(value, dict) else None
    return listed if isinstance(listed, list) else []


def _visible(folder: Path) -> list[Path]:
    """The files below a folder but those that are hidden, in order."""
    inner = sorted(file for file in folder.rglob("*") if file.is_file())
    return [file for file in inner if not any(part[0] in "._" for part in file.relative_to(folder).parts)]


def ignored_files_note(source: Source) -> str:
    """A line about the files of folders that nothing is read of, and about those that are read and look as if they were
    to be held out; empty where there are none."""
    folders = [path for path in (source if isinstance(source, tuple) else (source,)) if path.is_dir()]
    read = {file: splits.words_in(str(file.relative_to(folder))) for folder in folders for file in _files_in(folder)}
    aside = [str(file.relative_to(folder)) for folder in folders for file in _visible(folder) if file not in read]
    has_train = any(words & splits.TRAINING for words in read.values())
    held_out = [file.name for file, words in read.items() if has_train and words & splits.HELD_OUT]
    notes = {"ignored": aside, "learned too, although their names are those of held-out data": held_out}
    return "; ".join(f"{what}: {splits.some(names)}" for what, names in notes.items() if names)


def data_sha256(source: Source) -> str:
    """Digest of a file's bytes; of a folder, that of its files' names and digests; of several, that of theirs."""
    if isinstance(source, tuple):
        return hashlib.sha256("".join(map(data_sha256, source)).encode()).hexdigest()
    if source.is_file():
        return sha256_of(source)
    lines = (f"{sha256_of(file)}  {file.relative_to(source)}\n" for file in data_files(source))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def records(source: Source, bad: Bad) -> Iterator[tuple[str, Record]]:
    """Each good record with its place, all of one shape; the others go to `bad`."""
    shape: Shape | None = None
    good = 0
    for where, value in raws(data_files(source)):
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


def raws(files: Iterable[Path]) -> Iterator[Raw]:
    """All that the files hold, with its place: "a.jsonl line 3"."""
    return ((f"{file} {place}", value) for file in files for place, value in raw(file))


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


def raw(file: Path) -> Iterator[Raw]:
    """All that a file holds, one place after another. DataError where it cannot be read as what it is."""
    try:
        if file.stat().st_size == 0:
            raise DataError(f"{file}: the file is empty")
        _refuse_other_kind(file)
        if file.suffix.lower() in COLUMNS:
            yield from _columns(file)
            return
        if sample := foreign_sample(file):
            raise DataError(refusal(file, sample))
        if file.suffix.lower() in DELIMITERS:
            yield from rows(file)
        elif _is_lines(file):
            yield from _json_lines(file)
        else:
            yield from ((f"record {number}", value) for number, value in enumerate(values(file), start=1))
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or error}") from error


def _refuse_other_kind(file: Path) -> None:
    """DataError where the first bytes of a file are those of another kind than its name says."""
    try:
        with file.open("rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from error
    kind = next((kind for mark, kind in MAGIC.items() if head.startswith(mark)), None)
    if kind and kind.lower() != file.suffix[1:].lower():
        raise DataError(f"{file}: this is {kind} by its first bytes; {splits.kinds()} are read, under their own names")


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
        raise DataError(f"{file}: reading Parquet and Arrow needs pyarrow, which this Python lacks") from error
    row = 0
    try:
        for batch in _batches(file):
            refuse_repeated(batch.schema.names)
            for place in range(batch.num_rows):
                row += 1
                yield f"row {row}", _row(batch, place)
    except (ArrowException, ValueError, KeyError, OSError) as error:
        kind = file.suffix[1:].capitalize()
        raise DataError(f"{file}: not readable as {kind} after row {row}: {str(error).splitlines()[0]}") from error


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
