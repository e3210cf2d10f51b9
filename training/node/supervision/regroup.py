"""A run that lost nodes goes on with others: with which, and by which launch."""

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
IF_SILENT: frozenset[CauseKind] = frozenset({"not_ready", "not_launched"})
"""Causes behind which a node may be gone: then it does not answer."""
SUSPECT: frozenset[CauseKind] = frozenset({"hung", "peer_lost", "unheard", "gpu_failed"})
"""The same, or something of a node that answers is broken."""
OF_A_NODE: frozenset[CauseKind] = IF_SILENT | SUSPECT | {"node_lost", "reclaimed"}
"""Whatever else ended a run would end it again."""


class CannotGoOn(Exception):
    """A run does not go on by itself; the message says why."""


class Misfit(CannotGoOn):
    """By the plan's estimate it does not fit these nodes."""


@dataclass(frozen=True)
class Remains:
    """Of a run that ended because of a node."""

    hosts: tuple[Host, ...] = ()
    """The nodes that it goes on with, in their order; none where it does not go on by itself."""
    cut_off: bool = False
    """All others went at once: rather the head's own network, and they may come back."""


def remaining(
    hosts: tuple[Host, ...],
    end: Verdict,
    *,
    silent: Collection[str],
    back: Collection[str],
    leaving: Collection[str],
    suspected: bool = False,
) -> Remains:
    """What is left of these nodes. `silent`: those that did not answer when the run ended, of which some may be `back`;
    `leaving`: those that the cloud takes back; `suspected`: the node that the end names was named by one before. Pure.
    """
    gone, (head, *others) = ({*silent} - {*back}) | {*leaving}, [host.name for host in hosts]
    kind, node = end.cause.kind, end.node or head
    if kind in SUSPECT and not gone and (suspected or end.cause.xid is not None):
        gone = {node}
    if kind not in OF_A_NODE | {"asked"} or head in gone or EVERYBODY in gone:
        return Remains()
    if kind in IF_SILENT and not gone:  # it answers, and is not fit
        return Remains()
    stayed = {*others} - {*leaving}
    cut_off = len(stayed) > 1 and stayed <= {*silent} and not stayed <= {*back}
    return Remains(tuple(host for host in hosts if host.name not in gone), cut_off)


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
    launch = replace(
        with_hosts(launch, hosts, spent),
        arguments=launch.arguments if step is None or "--resume" in launch.arguments else ("--resume",),
        profile="" if any((run / PROFILE).glob("rank-*")) else launch.profile,
    )
    for name, text in {**files, **launcher_files(launch), LAUNCH: launch_text(launch)}.items():
        write_atomically(run / name, text)
    return launch


def with_hosts(launch: Launch, hosts: tuple[Host, ...], spent: float) -> Launch:
    """The same on these nodes."""
    prices = [host.price_h for host in hosts]
    price_h = None if launch.price_h is None or None in prices else sum(price or 0.0 for price in prices)
    return replace(launch, hosts=hosts, price_h=price_h, spent_before=spent)


def refitted(launch: Launch, hosts: tuple[Host, ...], machines: RunMachines | None = None) -> dict[str, str]:
    """The files of a run's folder that change with its nodes. Raises CannotGoOn; Misfit where it lacks more memory on
    them than on those of the launch, on which `--anyway` may have started it."""
    run, names = Path(launch.run_dir), [host.name for host in hosts]
    try:
        text, plan = (run / RECIPE).read_text(encoding="utf-8"), bounded_json((run / PLAN).read_text(encoding="utf-8"))
        machines = machines or parse_machines((run / MACHINES).read_text(encoding="utf-8"))
        recipe, start = parse_recipe(text, {}, RECIPE), parse_start_plan(plan)
        after = start.refit(recipe, machines.of(names))
        before = after if after.fits else start.refit(recipe, machines.of([host.name for host in launch.hosts]))
    except Exception as error:  # of files that may be damaged: the supervisor has an end to write
        raise CannotGoOn(str(error) or type(error).__name__) from error
    if after.missing_gib > before.missing_gib:
        raise Misfit(f"it does not fit {', '.join(names)}: {after.reason}")
    if after.recipe == recipe:
        return {}
    earlier = recipe_before(newest_step(run) or 0)
    kept = {} if (run / earlier).exists() else {earlier: text}
    return {**kept, RECIPE: after.recipe.to_toml(), PLAN: without_seconds(plan)}
