"""What its user calls each file of the data, which lie elsewhere on a head."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from training.text.files import object_in

if TYPE_CHECKING:
    from training.data.source import Source

NAMES = "names.json"
"""Beside a run's data: the user's own names of the files, by their places in the folder, in the order in which they are
read."""


def names_text(files: Mapping[str, Path | str], source: Source, folder: str = "") -> str:
    """NAMES for `files` of `source` by their places, those below `folder`. A name is the end of the path as it was
    typed, from the folder on that was named, and as long as tells it from the ends of all others."""
    sources = set(source if isinstance(source, tuple) else (source,))
    local = {place: file for place, file in files.items() if isinstance(file, Path)}
    counts = Counter(file.parts[-n:] for file in local.values() for n in range(1, len(file.parts) + 1))
    names = {}
    for place, file in local.items():
        its = next(each for each in (file, *file.parents) if each in sources)
        shortest = min(len(file.relative_to(its).parts) + 1, len(file.parts))
        ends = (file.parts[-n:] for n in range(shortest, len(file.parts) + 1))
        names[place.removeprefix(folder)] = str(Path(*next((end for end in ends if counts[end] == 1), file.parts)))
    return json.dumps(names, ensure_ascii=False, indent=1)


def called_by_user(folder: Path, names: Path) -> Callable[[Path], str]:
    """What its user calls a file below `folder`, by the NAMES at `names`: its place there where they do not say."""
    known = object_in(names)
    return lambda path: str(known.get(place := str(path.relative_to(folder)), place))
