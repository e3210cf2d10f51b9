"""The files of the data: which are read, where they lie on a head, and what their user calls them."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from training.data import splits
from training.data.hub import HubDataSet, on_hub
from training.data.json_text import json_value
from training.data.sample import DataError
from training.data.splits import ARROW, COLUMNS, NO_DATA, SUFFIXES
from training.text.files import sha256_of

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
NO_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""In a path: control characters, and bytes that are not UTF-8."""
Source = Path | tuple[Path, ...]
"""A file or a folder of them; or several, one after another."""


class DataFile(NamedTuple):
    """A file of the data."""

    path: Path
    name: str
    """What its user calls it, which every sentence about it says."""


@dataclass(frozen=True)
class Data:
    """The files of a source, in the order in which they are read."""

    source: Source
    files: tuple[DataFile, ...]

    @property
    def name(self) -> str:
        """What all of it is called in a sentence."""
        return splits.some([file.name for file in self.files])


def data_of(source: Source, name_of: Callable[[Path], str] = str) -> Data:
    """What is read of `source`; `name_of` says what its user calls a file. Raises DataError as `data_files` does."""
    return Data(source, tuple(DataFile(path, name_of(path)) for path in data_files(source)))


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


def downloaded(dataset: HubDataSet, folder: Path) -> Data:
    """The files of a data set of the Hub that lie in `folder`, called by its name."""
    return data_of(folder, lambda path: f"{dataset}/{path.relative_to(folder)}")


def can_check_here(data: Data) -> bool:
    """Whether this machine has what reading them takes: Parquet and Arrow need pyarrow."""
    return importlib.util.find_spec("pyarrow") is not None or not any(
        file.path.suffix.lower() in COLUMNS for file in data.files
    )


def data_files(source: Source) -> list[Path]:
    """The files to read, in order. DataError where there is none, one of no known kind or name, or one of several
    twice."""
    sources = source if isinstance(source, tuple) else (source,)
    files = [file for each in sources for file in _files_in(each)]
    if odd := next((file for file in files if NO_TEXT.search(str(file))), None):
        raise DataError(f"{str(odd)!a}: this path is not UTF-8, or has control characters; rename it")
    places = Counter(file.resolve() for file in files) if len(sources) > 1 else Counter()
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
        try:
            fault = other_kind(path)
        except OSError as error:
            fault = str(error.strerror)
        unknown = f"{path.suffix or 'no suffix'} is no known kind of data; {splits.kinds()} are"
        raise DataError(f"{path}: {fault or unknown}")
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


def data_sha256(source: Source, sha256: Callable[[Path], str] = sha256_of) -> str:
    """Digest of a file's bytes; of a folder or several, that of their names and digests. `sha256` gives that of a
    file."""
    if isinstance(source, tuple):
        lines = (f"{data_sha256(each, sha256)}  {each.name}\n" for each in source)
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    if source.is_file():
        return sha256(source)
    lines = (f"{sha256(file)}  {file.relative_to(source)}\n" for file in data_files(source))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def other_kind(path: Path) -> str:
    """What a file is by its first bytes, where its name says otherwise; empty where they agree. Raises OSError."""
    with path.open("rb") as stream:
        head = stream.read(8)
    kind = next((kind for mark, kind in MAGIC.items() if head.startswith(mark)), None)
    if not kind or kind.lower() == path.suffix[1:].lower():
        return ""
    return f"this is {kind} by its first bytes; {splits.kinds()} are read, under their own names"
