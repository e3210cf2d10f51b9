"""What renting, snapshots and a rebuild ask of what runs on the machines. The fabfile hands their tasks the answer, in
`c.spotune.workload` (training/laptop/workload.py): none of them knows what a training is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # `fab --list` loads this file
    from datetime import datetime
    from pathlib import Path

    from inventory.cloud.port import Cloud
    from inventory.nodes import Node
    from inventory.notify import Message
    from inventory.renting.down import DownPlan
    from inventory.settings import Settings


@dataclass(frozen=True)
class RunState:
    """A run, as far as its machines are concerned."""

    run_id: str
    reason: str
    """What it is, and why."""
    is_active: bool = False
    is_finished: bool = False
    is_stopped: bool = False
    """Whether somebody asked it to stop."""
    lacks_machines: bool = False
    """Whether it ended because of machines, and goes on once they are there."""
    addresses: frozenset[str] = frozenset()
    """Private ones of the machines that it goes on with, or had last."""
    nodes: int = 0
    """How many machines it has had."""
    step: int | None = None
    """Of its newest checkpoint."""
    news: tuple[Message, ...] = ()
    """What is told of it to people who do not watch."""


class NodeWorkload(Protocol):
    """Models by the names of [models] in cluster.toml, and runs by their ids. What is wrong with either is raised as
    one sentence, with an exit code of its own."""

    def refuse_unknown(self, models: Sequence[str]) -> list[str]:
        """Refuse names that mean no model; a sentence for each that could not be looked up."""

    def refuse_incomplete(self, models: Sequence[str], *, sent_before: bool) -> None:
        """Refuse folders of this machine that are no whole model. `sent_before`: the head may have them already."""

    def notes_on(self, models: Sequence[str]) -> list[str]:
        """What is to be known of them before machines are rented, a sentence each."""

    def model_folder(self, model: str) -> str:
        """Its folder below /data/models of a node."""

    def stays_on(self) -> str:
        """That a run that is going on takes no machine that comes; empty where none is."""

    def lost_with(
        self, plan: DownPlan, *, named: bool, agreed: bool, force: bool, stop_run: bool = False
    ) -> tuple[list[str], str]:
        """What goes with the machines beside themselves, a sentence each; the run to stop first. Raises RentError
        where that is too much but for `force`: for machines that were `named`, and where the user `agreed` before
        reading it."""

    def stop(self, run_id: str) -> None:
        """Stop it as `fab stop` does."""

    def end_all(self, head: Node, *, stop_run: bool) -> None:
        """No run is going on on this head when this returns. Raises RentError where one is and may not be stopped."""

    def tell_release(self, head: Node, at: datetime) -> str:
        """Tell the head when the first machine is released; why it could not be told."""

    def run_state(self, cloud: Cloud, settings: Settings, run_id: str) -> RunState | str:
        """What this training does, or the one that is going on; else why that is not known. Raises RentError where that
        is no run's id."""

    def go_on(self, run_id: str) -> None:
        """Let a run that ended go on, or one that goes on take in all machines there are."""

    def fetch(self, run_id: str) -> None:
        """Bring home what a run has learned."""

    def leave_idle(self) -> None:
        """Nobody keeps the machines any more: where nothing uses them they go as `hours_idle` says."""

    def trainings(self, cloud: Cloud, settings: Settings) -> list[tuple[str, str]] | None:
        """The trainings on the head that have a checkpoint, and their states, the oldest first; None where it does
        not tell."""


@dataclass(frozen=True)
class HandedOver:
    """`c.spotune` of a task: what it asks of another folder's work. One value, as invoke takes each key of a mapping
    from the environment too."""

    workload: NodeWorkload
    doctor: Callable[..., Any]
    """The task `fab doctor`."""
    keep_packages: Path
    """A program for a node: keeps its packages on its data disk."""
    cpu_requirements: Callable[[], str]
    """Every package of a CPU node, for pip."""
