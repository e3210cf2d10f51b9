"""A look as its reader knows the data: files by their user's names, places in the reader's language. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from training.data.look.content import Look
from training.data.look.sentences import bad_record, place
from training.words import Say

NAMES = "names.json"
"""Beside a run's data: what the user calls the files, by their places in the folder."""
RUN_DATA = re.compile(r".*/data/(?P<place>train[./].*)", re.DOTALL)


def names_text(files: Mapping[str, Path | str]) -> str:
    """NAMES for the files of a run by their places there; no folder of the user's machine is told."""
    own = {place.removeprefix("data/"): file.name for place, file in files.items() if isinstance(file, Path)}
    return json.dumps(own, ensure_ascii=False, indent=1) + "\n"


def own_name(file: str, names: Mapping[str, str]) -> str:
    """What a file is called by who gave it; its place in the run's data where that is not known."""
    found = RUN_DATA.fullmatch(file)
    return names.get(found["place"], found["place"]) if found else file


def named(look: Look, names: Mapping[str, str] | None, say: Say) -> Look:
    """The same with the names of a run's files, or as they are where it is of no run; and what
    was said of records and where they stand in words of the page."""
    own = {file.name: file.name if names is None else own_name(file.name, names) for file in look.survey.files}
    longest_first = sorted(own, key=len, reverse=True)
    shown = sorted({*own.values()}, key=len, reverse=True)

    def renamed(text: str) -> str:
        for file in longest_first:
            text = text.replace(file, own[file])
        return text

    def places(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((place(renamed(one), say), place(renamed(other), say)) for one, other in pairs)

    repeats = look.repeats
    if repeats:
        repeats = replace(repeats, shown=places(repeats.shown), leaks_shown=places(repeats.leaks_shown))
    return replace(
        look,
        survey=replace(look.survey, files=tuple(replace(file, name=own[file.name]) for file in look.survey.files)),
        bad_shown=tuple(bad_record(renamed(line), shown, say) for line in look.bad_shown),
        refused=renamed(look.refused),
        repeats=repeats,
        samples=tuple(replace(sample, where=place(renamed(sample.where), say)) for sample in look.samples),
    )
