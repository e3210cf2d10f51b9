"""Which files of a data set are trained on: those of its default configuration and of its training split. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from fnmatch import filter as matching
from pathlib import PurePosixPath
from typing import Any

from training.data.delimited import DELIMITERS
from training.data.sample import DataError

JSON_LINES = frozenset({".jsonl", ".ndjson"})
PARQUET, ARROW = ".parquet", ".arrow"
COLUMNS = {PARQUET, ARROW}
"""Kinds that pyarrow reads; Arrow is what save_to_disk of datasets writes."""
SUFFIXES = JSON_LINES | {".json"} | COLUMNS | DELIMITERS.keys()
OF_SPLITS, STATE = "dataset_dict.json", "state.json"
"""In a folder of save_to_disk: the first names its splits, which are folders; the second the files of one of these."""
NO_DATA = {"dataset_info.json", "dataset_infos.json", OF_SPLITS, STATE, "config.json"}
"""Files of JSON that lie beside data and are none."""
TRAIN = "train"
TRAINING = {TRAIN, "training"}
HELD_OUT = {"test", "tests", "testing", "validation", "valid", "val", "dev", "eval", "evals", "evaluation"}
"""What is called so, beside what is called train, is mostly held out."""
MOST_NAMED = 8
"""Files or splits in a sentence, by name."""
_PACKED = frozenset({".gz", ".zst", ".xz", ".bz2", ".zip"})
_KINDS = ({PARQUET}, JSON_LINES, {".json"}, DELIMITERS.keys(), {ARROW})
"""Of a data set that is there in several, the first."""
_SHARD = re.compile(r"[-_./]?(?<![vV\d])\d+([-_.]of[-_.]\d+|([-_.]\d+)*)(-[0-9a-f]{16})?$")
"""The end of a file's name that only counts it, as -00000-of-00002 or the 2 of train2; that of v2 is a version's."""
Parts = dict[str, list[str]]
"""The files of each part of a data set that could be trained on, by the name that chooses it."""


def chosen_files(
    names: Iterable[str], configs: Any = None, choice: str = "", how: str = "give the files of one"
) -> list[str]:
    """The files to train on among the `names` of a data set's files. `configs` as in its README; without them the names
    say what belongs together. `choice`: a configuration, a part (CONFIGURATION:SPLIT), or parts with `*`; `how` a user
    makes it. DataError where no part is meant, or one of several could be."""
    visible = [name for name in names if not any(part[0] in "._" for part in name.split("/"))]
    try:
        parts, meant = _configured(visible, configs) if configs else _by_name(visible)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError("its README.md has configs that cannot be read") from error
    if not parts:
        raise DataError(f"no {kinds()} file to train on in it")
    chosen = meant[choice] if choice in meant else matching(parts, choice)
    if not chosen or (choice in meant and len(chosen) > 1):
        fault = "several parts of it are" if chosen else "no part of it is"
        raise DataError(f"{fault} {choice or 'for training'}; it has {some(chosen or list(parts))}: {how}")
    files = list(dict.fromkeys(file for part in chosen for file in parts[part]))
    if other := next((file for file in files if PurePosixPath(file).suffix.lower() not in SUFFIXES), ""):
        raise DataError(f"{other} is to be trained on and is not {kinds()}: unpack or convert it")
    return files


def training_splits(names: Iterable[str]) -> list[str]:
    """Those that may be meant, also by files' names: `train` alone; without it, those named so among other words; else
    those not held out."""
    words = {name: words_in(name) for name in names}
    training = [name for name in words if words[name] & TRAINING]
    return [TRAIN] if TRAIN in words else training or [name for name in words if not words[name] & HELD_OUT]


def words_in(name: str) -> set[str]:
    """The words of a file's path."""
    return set(re.split(r"[^a-z]+", name.lower()))


def some(names: Sequence[str]) -> str:
    """The first of them, for a sentence."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def kinds() -> str:
    """The suffixes that are read, for a sentence."""
    return ", ".join(sorted(SUFFIXES))


def _configured(names: Sequence[str], configs: Sequence[dict[str, Any]]) -> tuple[Parts, Parts]:
    """The parts, and which of them each configuration means; none ("") means the default one, else any."""
    parts: Parts = {}
    meant: Parts = {}
    default = None
    for config in configs:
        title = str(config.get("config_name", "default"))
        splits = {split: files for split, files in _splits(names, config).items() if files}
        parts |= {f"{title}:{split}": files for split, files in splits.items()}
        meant[title] = [f"{title}:{split}" for split in training_splits(splits)]
        if config.get("default") or title == "default":
            default = title
    any_of_them = [part for each in meant.values() for part in each]
    return parts, {**meant, "": any_of_them if default is None else meant[default]}


def _splits(names: Sequence[str], config: dict[str, Any]) -> Parts:
    from fsspec.utils import glob_translate

    folder, entries = config.get("data_dir", ""), config.get("data_files")
    if entries is None:
        return _by_name([name for name in names if PurePosixPath(name).is_relative_to(folder)])[0]
    splits: Parts = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        split, paths = (TRAIN, entry) if isinstance(entry, str) else (entry["split"], entry["path"])
        for path in [paths] if isinstance(paths, str) else paths:
            pattern = re.compile(glob_translate(posixpath.normpath(posixpath.join(folder, path))))
            splits.setdefault(split, []).extend(filter(pattern.match, names))
    return splits


def _by_name(names: Iterable[str]) -> tuple[Parts, Parts]:
    """Of one kind, the files whose names are those of training data, else of no held-out data: those together whose
    names differ in a number at their end alone."""
    known = [name for name in names if PurePosixPath(name).name not in NO_DATA and _kind(name) in SUFFIXES]
    training = training_splits(known)
    kind = next((kind for kind in _KINDS if any(_kind(name) in kind for name in training)), set())
    parts: Parts = {}
    for name in sorted(name for name in training if _kind(name) in kind):
        parts.setdefault(_SHARD.sub("", name[: name.lower().rindex(_kind(name))]), []).append(name)
    return parts, {"": list(parts)}


def _kind(name: str) -> str:
    """What a file is by its name, packed or not."""
    path = PurePosixPath(name.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in _PACKED else path.suffix
