"""What its user calls each file of a run's data, which have names of their own there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

NAMES = "names.json"
"""Beside a run's data: the user's own names of the files, by their places in the folder."""
RUN_DATA = re.compile(r".*/data/(?P<place>train[./].*)", re.DOTALL)


def names_text(files: Mapping[str, Path | str]) -> str:
    """NAMES for the files of a run by their places there; no folder of the user's machine is in it."""
    own = {place.removeprefix("data/"): file.name for place, file in files.items() if isinstance(file, Path)}
    return json.dumps(own, ensure_ascii=False, indent=1) + "\n"


def own_name(file: str, names: Mapping[str, str]) -> str:
    """The user's name of a file; its place in the run's data where that is not known."""
    match = RUN_DATA.fullmatch(file)
    return names.get(match["place"], match["place"]) if match else file
