"""What `fab keep` does next, by what it sees of a run and its machines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from inventory.renting import members
from inventory.renting.workload import RunState

FUTILE = 3
"""So many resumes with the same machines may follow each other without a newer checkpoint."""


@dataclass(frozen=True)
class Observed:
    """A run and its machines at a moment."""

    run: RunState
    machines: Mapping[str, str]
    """Private addresses of those that stand, by name; none that is being taken back."""
    missing: tuple[str, ...] = ()
    """Names of those that may be ordered in place of others."""
    bare: frozenset[str] = frozenset()
    """Names of those that are stopped, or have no base deploy."""
    new: frozenset[str] = frozenset()
    """Private addresses of those that the run never had, and was not asked to go on with just now."""
    futile: int = 0
    """Resumes with these machines since the newest checkpoint."""
    is_short: bool = False
    """Whether the run is to go on with those that stand before the missing ones are replaced: it stands still, or they
    were not to be had."""


@dataclass(frozen=True)
class NextAction:
    """What to do next."""

    act: Literal["wait", "replace", "go on", "end"]
    why: str = ""


def next_action(seen: Observed) -> NextAction:
    """Pure."""
    run = seen.run
    if not (run.is_active or run.lacks_machines):
        return NextAction("end", run.reason)
    if run.is_active and members.HEAD not in seen.machines:
        return NextAction("wait", f"{members.HEAD} is being taken back, and its disk is free only once it is gone")
    if not (run.is_active or members.HEAD in seen.machines or seen.missing):
        return NextAction("end", f"{run.reason}, and no more machines may be ordered")
    helps = bool(seen.new) if run.is_active else members.HEAD in seen.machines and seen.futile < FUTILE
    if seen.bare or (seen.missing and not (helps and seen.is_short)):
        begun = seen.bare if members.HEAD in seen.machines else ()
        does = "to start and deploy" if begun else "to replace"
        return NextAction("replace", f"{does}: {', '.join(sorted(begun) or seen.missing)}")
    if run.is_active:
        return NextAction("go on", "new machines stand") if seen.new else NextAction("wait")
    if seen.futile >= FUTILE:
        return NextAction("end", f"{run.reason}; {FUTILE} resumes saved nothing new")
    return NextAction("go on", run.reason)
