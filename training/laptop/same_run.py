"""Whether what lies at home under a run's id is an earlier copy of it: a fetch replaces nothing else.

The same id can be of two clusters, and of one disk and an older copy of it that has gone on by itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from training.bounded import bounded_json
from training.laptop.download import Download
from training.run_folder import CHECKPOINTS, CLAIM, METRICS, checkpoint_steps
from training.verify import FetchError


def refuse_another(download: Download, there: Collection[str], newest: int | None, local: Path) -> None:
    """FetchError where `local` has what the head's run does not go back to. `there`: what is in the head's folder;
    `newest`: the step of its newest checkpoint."""
    if why := _difference(download, there, newest, local):
        raise another(local, why)


def another(local: Path, why: str) -> FetchError:
    """The refusal, with the way out."""
    move = shlex.join(["mv", str(local), f"{local}.kept"])
    return FetchError(
        f"{local} is not an earlier copy of this run: {why}. Nothing of it was replaced; "
        f"to have both: {move}, then fetch again"
    )


def _difference(download: Download, there: Collection[str], newest: int | None, local: Path) -> str:
    if (local / CLAIM).is_file():
        mine = (local / CLAIM).read_bytes()
        if CLAIM not in there or download.start_of(CLAIM, len(mine) + 1) != mine:
            return "it is another start's, of the same second"
    steps = checkpoint_steps(path.name for path in (local / CHECKPOINTS).glob("*"))
    if not steps:
        return ""
    if newest is None or newest < max(steps):
        return f"it has step {max(steps)}, and the head {f'only step {newest}' if newest else 'no checkpoint'}"
    lines = learned(local / METRICS, max(steps))
    if lines and (METRICS not in there or download.start_of(METRICS, len(lines)) != lines):
        return f"the head's went another way to step {max(steps)}"
    return ""


def learned(metrics: Path, step: int) -> bytes:
    """The lines of metrics.jsonl up to a step. With the time each was written they are one run's alone, and whoever
    goes on from that step's checkpoint keeps them."""
    kept = b""
    for line in metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else ():
        try:
            at = int(bounded_json(line.decode())["step"])
        except (KeyError, OverflowError, TypeError, ValueError):  # a line that was cut: the rest is no proof
            break
        if at > step:
            break
        kept += line
    return kept
