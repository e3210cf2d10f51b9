"""Before machines go back: what is going on there, and what of it nobody else has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.laptop import runs
from training.laptop.head_node import Head
from training.laptop.run_list import copies, listing
from training.launch import LaunchError

SHOWN = 3
"""Runs that a sentence names."""


@dataclass(frozen=True)
class Stake:
    """What goes with a cluster's machines."""

    active: str = ""
    """The run that is going on, or about to; empty where none is."""
    hosts: frozenset[str] = frozenset()
    """The nodes it runs on; none where they are not known yet."""
    unfetched: tuple[tuple[str, int], ...] = ()
    """Runs whose checkpoint of this step did not come home, the newest first."""

    def of_nodes(self, nodes: Collection[str], head: str) -> Iterator[str]:
        """Why some machines should not go, a sentence each."""
        if self.active and not self.hosts:
            yield f"{self.active} is being started, on nodes that are not known yet: wait until it runs"
        elif there := self.hosts & set(nodes):
            yield f"{self.active} is running on {', '.join(sorted(there))}: fab stop lets it save first"
        if head in nodes and self.unfetched:
            yield self.left_on(head)

    @property
    def stays_on(self) -> str:
        """That a run takes no machine that comes while it goes on; empty where none does."""
        if not self.hosts:
            return ""
        return (
            f"{self.active} stays on {', '.join(sorted(self.hosts))}; to go on on the new machines too, after the base "
            f"deploy: fab stop, then fab train --resume {self.active}"
        )

    def left_on(self, head: str) -> str:
        """What did not come home, in a sentence."""
        shown = [f"{run_id} (step {step})" for run_id, step in self.unfetched[:SHOWN]]
        more = len(self.unfetched) - len(shown)
        rest = f" and {more} more (fab runs)" if more else ""
        return f"did not come home from {head}: {', '.join(shown)}{rest}; fab fetch --run {self.unfetched[0][0]}"


def at_stake(head: Head, home: Path) -> Stake:
    """What goes with the machines of a head. Raises HeadError."""
    active = runs.going_on(head)
    there = listing.rows(copies.on_laptop(home), copies.on_head(head))
    left = tuple((row.run_id, row.unfetched) for row in there if row.unfetched is not None)
    return Stake(active, _hosts(head, active), left)


def _hosts(head: Head, active: str) -> frozenset[str]:
    try:
        return frozenset(host.name for host in runs.read_launch(head, active).hosts) if active else frozenset()
    except LaunchError:  # it is being prepared
        return frozenset()
