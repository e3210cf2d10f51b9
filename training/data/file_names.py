"""What its user calls each file of the data, which lie elsewhere on a head."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.text.files import object_in

if TYPE_CHECKING:
    from training.data.source import Source

NAMES = "names.json"
"""Beside a run's data: the user's own names of the files, by their places in the folder, in the order in which they are
read."""


def names_text(files: Mapping[str, Path | str], source: Source, folder: str = "") -> str:
    """NAMES for `files` of `source` by their places, those below `folder`. A name is the file's path below the source
    that it is of, behind the shortest end of the source's own path that no other source has."""
    ends = _ends(source if isinstance(source, tuple) else (source,))
    names = {}
    for place, file in files.items():
        if isinstance(file, Path):
            its = next(each for each in (file, *file.parents) if each in ends)
            names[place.removeprefix(folder)] = str(Path(*ends[its], *file.relative_to(its).parts))
    return json.dumps(names, indent=1)  # in ASCII: a file's name need not be UTF-8


def _ends(sources: Sequence[Path]) -> dict[Path, tuple[str, ...]]:
    parts = {each: (each.resolve() if each.name in {"", ".."} else each).parts for each in sources}
    tails = {each: [whole[-n:] for n in range(1, len(whole) + 1)] for each, whole in parts.items()}
    counts = Counter(tail for each in tails.values() for tail in each)
    return {each: next((tail for tail in own if counts[tail] == 1), own[-1]) for each, own in tails.items()}


def called_by_user(folder: Path, names: Path) -> Callable[[Path], str]:
    """What its user calls a file below `folder`, by the NAMES at `names`: its place there where they do not say."""
    known = object_in(names)
    return lambda path: str(known.get(place := str(path.relative_to(folder)), place))
