"""What its user calls each file of the data, which lie elsewhere on a head."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from training.text.files import object_in

if TYPE_CHECKING:
    from training.data.source import Source

NAMES = "names.json"
"""Beside a run's data: the user's own names of the files, by their places in the folder, in the order in which they are
read."""


def names_text(files: Mapping[str, Path | str], source: Source, folder: str = "") -> str:
    """NAMES for `files` of `source` by their places, those below `folder`: no more of the user's folders is in a name
    than tells one source from another."""
    own = {place: _name(file, source) for place, file in files.items() if isinstance(file, Path)}
    return json.dumps({place.removeprefix(folder): name for place, name in own.items()}, ensure_ascii=False, indent=1)


def _name(file: Path, source: Source) -> str:
    """The file below the source it is of, which has as much of its path before it as no other has."""
    sources = source if isinstance(source, tuple) else (source,)
    parts = {each: each.absolute().parts for each in sources}
    depth = next(depth for depth in count(1) if len({whole[-depth:] for whole in parts.values()}) == len(parts))
    its = next(each for each in sources if file == each or each in file.parents)
    return "/".join((*parts[its][-depth:], *file.relative_to(its).parts))


def called_by_user(folder: Path, names: Path) -> Callable[[Path], str]:
    """What its user calls a file below `folder`, by the NAMES at `names`: its place there where they do not say."""
    known = object_in(names)
    return lambda path: str(known.get(place := str(path.relative_to(folder)), place))
