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
OF_A_NODE: frozenset[CauseKind] = frozenset(
    {"node_lost", "reclaimed", "not_ready", "not_launched", "peer_lost", "unheard", "hung", "gpu_failed"}
)
"""Causes that a node may have; whatever else ended a run would end it again."""


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
    steady: tuple[Host, ...] = ()
    """Those that answered all the time."""


def named(end: Verdict) -> str:
    """The node that an end blames; empty where it names none, or but the one that told of it."""
    told = end.cause.kind == "peer_lost" and end.cause.peer is None
    return "" if told else end.node or ""


def remaining(
    hosts: tuple[Host, ...],
    end: Verdict,
    *,
    silent: Collection[str],
    back: Collection[str],
    leaving: Collection[str],
    suspected: Collection[str] = (),
) -> Remains:
    """What is left of these nodes. `silent`: those that did not answer when the run ended, of which some may be `back`;
    `leaving`: those that the cloud takes back; `suspected`: those that an earlier end named. Pure."""
    gone, (head, *others) = ({*silent} - {*back}) | {*leaving}, [host.name for host in hosts]
    if end.cause.kind not in OF_A_NODE | {"asked"} or head in gone or EVERYBODY in gone:
        return Remains()
    node, broken = named(end), end.cause.kind == "gpu_failed" and end.cause.xid is not None
    if broken and node == head:
        return Remains()
    if not gone and (broken or node in suspected):
        gone = {node} - {head}
    stayed = {*others} - {*leaving}
    cut_off = len(stayed) > 1 and stayed <= {*silent} and not stayed <= {*back}
    left = tuple(host for host in hosts if host.name not in gone)
    return Remains(left, cut_off, tuple(host for host in left if host.name not in silent))


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


def learn(run: Path, machines: RunMachines) -> None:
    """Keep what these nodes have beside what others have that the run had before. OSError where that cannot be."""
    write_atomically(run / MACHINES, machines_text(with_earlier(run, machines)))


def with_earlier(run: Path, machines: RunMachines) -> RunMachines:
    """The same with those that its folder knows."""
    try:
        return machines.after(parse_machines((run / MACHINES).read_text(encoding="utf-8")))
    except ValueError:
        return machines


def regrouped(launch: Launch, hosts: tuple[Host, ...], spent: float) -> Launch:
    """The launch that goes on with these nodes, which lies in the run's folder with a recipe that fits them. `launch`:
    of the last ranks; `spent`: what the run has cost until now. Raises CannotGoOn, and OSError where the folder cannot
    be written."""
    run, step = Path(launch.run_dir), newest_step(Path(launch.run_dir))
    files = refitted(launch, hosts)
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
