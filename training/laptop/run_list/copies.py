"""Where a run's folder lies, on the laptop and on the head, and what each copy has."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.bounded import figure_in
from training.laptop import runs
from training.laptop.follow import RunLook
from training.laptop.head_node import Head, HereHead
from training.learned import wanted_step
from training.run_folder import CHECKPOINTS, CLAIM, checkpoint_steps, was_made_in
from training.starts import STARTS
from training.sums import BEST

PART, END = "\x1e", "\x1d"
PART_OCTAL = "\\036"
SIZES_S = 120.0


@dataclass(frozen=True)
class Copy:
    """A run's folder in one place."""

    look: RunLook
    size_bytes: int
    claim: str
    """Tells this run from another of the same id; empty where nothing says so."""
    steps: tuple[int, ...]
    """Of its whole checkpoints, ascending."""
    wanted: int | None
    """The step that a fetch brings: of the best checkpoint, else of the newest."""
    first_start: float = 0.0
    """Seconds since 1970; 0 where nothing says it."""
    made_here: bool = False
    """On the laptop: it ran there, with --here, and was not fetched."""
    laid_down: bool = False
    """Whether what it learned can be loaded from its folder's `adapter` or `model`."""
    base_model: str = ""
    """As its recipe names it; empty where nothing says so."""


def on_head(head: Head) -> dict[str, Copy]:
    """The runs on a head, by their ids. Raises HeadError."""
    looks = {seen.run_id: seen for seen in runs.all_runs(head)}
    return _copies(looks, head.shell(_details_command(str(head.runs)), SIZES_S))


def on_laptop(folder: Path) -> dict[str, Copy]:
    """The runs in a folder of this machine: fetched, and made with --here."""
    head = HereHead(folder)
    here = frozenset(run_id for run_id in _names(head.runs) if was_made_in(head.runs / run_id))
    looks = {seen.run_id: seen for seen in runs.all_runs(head)}
    return _copies(looks, head.shell(_details_command(str(head.runs)), SIZES_S), here)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _details_command(folder: str) -> str:
    """A shell command that prints of every run there what `_copies` reads, in its order."""
    parts = (
        '"$r"',
        '"$(du -sk "$r" | sed \'s/[^0-9].*//\')"',
        f'"$(head -c 100 "$r/{CLAIM}" 2>/dev/null)"',
        f'"$(ls "$r/{CHECKPOINTS}" 2>/dev/null)"',
        f'"$(head -c 100 "$r/{CHECKPOINTS}/{BEST}" 2>/dev/null)"',
        f'"$(sed -n \'1s/.*"at": *\\([0-9.]*\\).*/\\1/p\' "$r/{STARTS}" 2>/dev/null)"',
        '"$([ -e "$r/adapter" ] || [ -e "$r/model" ] && echo there)"',
        '"$(grep -m 1 "^base_model = " "$r/recipe.toml" 2>/dev/null)"',
    )
    line = f"printf '{PART_OCTAL.join(['%s'] * len(parts))}\\035' {' '.join(parts)}"
    return (
        f'cd {shlex.quote(folder)} 2>/dev/null || exit 0; for d in */; do r=${{d%/}}; [ -d "$r" ] && {line}; done; true'
    )


def _base_model(line: str) -> str:
    try:
        return str(tomllib.loads(line).get("base_model", ""))
    except tomllib.TOMLDecodeError:
        return ""


def _copies(looks: Mapping[str, RunLook], details: str, here: frozenset[str] = frozenset()) -> dict[str, Copy]:
    found = {}
    for text in details.split(END):
        run_id, *rest = text.split(PART)
        if run_id in looks and len(rest) == 7:
            kib, claim, names, best, first, laid, base = rest
            steps = tuple(checkpoint_steps(names.split()))
            wanted = wanted_step(names.split(), best)
            size_bytes = int(figure_in(kib)) * 1024
            found[run_id] = Copy(
                *(looks[run_id], size_bytes, claim.strip(), steps, wanted, figure_in(first), run_id in here),
                *(bool(laid), _base_model(base)),
            )
    return found
