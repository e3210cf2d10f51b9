"""A run that lost nodes goes on with the others: with which of them, and by which launch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from training.node.supervision.failure import Verdict
from training.plan.refit import RunMachines, machines_text, parse_machines, parse_start_plan, without_seconds
from training.recipe.reading import parse_recipe
from training.run.causes import CauseKind
from training.run.folder import LAUNCH, MACHINES, PLAN, PROFILE, RECIPE, recipe_before, write_atomically
from training.run.launch import Host, Launch, launch_text
from training.run.launchers import launcher_files
from training.run.notices import EVERYBODY, newest_step
from training.text.files import bounded_json

FUTILE = 3
"""So many generations one after the other may end without a newer checkpoint."""
IF_SILENT: frozenset[CauseKind] = frozenset({"not_ready", "peer_lost", "unheard", "not_launched"})
"""Causes behind which a node may be gone: then it does not answer."""
OF_A_NODE: frozenset[CauseKind] = IF_SILENT | {"node_lost", "reclaimed"}
"""Whatever else ended a run would end it again."""


class CannotGoOn(Exception):
    """A run does not go on by itself; the message says why."""


def remaining(
    launch: Launch, end: Verdict, silent: Collection[str], back: Collection[str], leaving: Collection[str]
) -> tuple[Host, ...]:
    """The nodes that a run goes on with, in their order, after it ended because of a node; none where it does not go on
    by itself. `silent`: nodes that did not answer then, of which some may be `back`; `leaving`: those that the cloud
    takes back. Pure."""
    gone, (head, *others) = ({*silent} - {*back}) | {*leaving}, [host.name for host in launch.hosts]
    if end.cause.kind not in OF_A_NODE | {"asked"} or head in gone or EVERYBODY in gone:
        return ()
    stayed = {*others} - {*leaving}
    if len(stayed) > 1 and stayed <= {*silent}:  # all at once: rather the head's own network
        return ()
    if end.cause.kind in IF_SILENT and not gone:  # it answers, and is not fit
        return ()
    return tuple(host for host in launch.hosts if host.name not in gone)


@dataclass
class Attempts:
    """The generations of a run so far: whether it gets on."""

    step: int | None
    """Of the newest checkpoint when the last one began."""
    futile: int = 0

    def take(self, step: int | None) -> bool:
        """One ended with this step saved; whether the next one may be tried."""
        self.futile = 0 if (step or 0) > (self.step or 0) else self.futile + 1
        self.step = step
        return self.futile < FUTILE


def regrouped(launch: Launch, hosts: tuple[Host, ...], spent: float, machines: RunMachines | None = None) -> Launch:
    """The launch that goes on with these nodes, which lies in the run's folder with a recipe that fits them. `spent`:
    what the run has cost until now; `machines`: in place of those that were known. Raises CannotGoOn, and OSError where
    the folder cannot be written."""
    run, step = Path(launch.run_dir), newest_step(Path(launch.run_dir))
    files = refitted(launch, hosts, machines)
    if machines:
        files[MACHINES] = machines_text(machines)
    prices = [host.price_h for host in hosts]
    launch = replace(
        launch,
        hosts=hosts,
        arguments=launch.arguments if step is None or "--resume" in launch.arguments else ("--resume",),
        price_h=None if launch.price_h is None or None in prices else sum(price or 0.0 for price in prices),
        spent_before=spent,
        profile="" if any((run / PROFILE).glob("rank-*")) else launch.profile,
    )
    for name, text in {**files, **launcher_files(launch), LAUNCH: launch_text(launch)}.items():
        write_atomically(run / name, text)
    return launch


def refitted(launch: Launch, hosts: tuple[Host, ...], machines: RunMachines | None = None) -> dict[str, str]:
    """The files of a run's folder that change with its nodes. Raises CannotGoOn."""
    run, names = Path(launch.run_dir), [host.name for host in hosts]
    try:
        text, plan = (run / RECIPE).read_text(encoding="utf-8"), bounded_json((run / PLAN).read_text(encoding="utf-8"))
        machines = machines or parse_machines((run / MACHINES).read_text(encoding="utf-8"))
        recipe = parse_recipe(text, {}, RECIPE)
        after = parse_start_plan(plan).refit(recipe, machines.of(names))
    except Exception as error:  # of files that may be damaged: the supervisor has an end to write
        raise CannotGoOn(str(error) or type(error).__name__) from error
    if not after.fits:
        raise CannotGoOn(f"it does not fit {', '.join(names)}: {after.reason}")
    if after.recipe == recipe:
        return {}
    before = recipe_before(newest_step(run) or 0)
    kept = {} if (run / before).exists() else {before: text}
    return {**kept, RECIPE: after.recipe.to_toml(), PLAN: without_seconds(plan)}
