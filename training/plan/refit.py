"""The recipe of a run that goes on: as it is while it fits the machines there are, else decided anew. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from training.cost.shape import ModelShape, read_outline
from training.cost.strategies import cost_of
from training.plan.calibration import read_record
from training.plan.facts import Known, NodeHardware, machines_of, rank_cards
from training.plan.machines import PlannedMachines, Workload
from training.plan.options import Search, choose
from training.recipe.reading import with_changes
from training.recipe.recipe import Recipe, flat
from training.recipe.tables import OF_A_STRATEGY
from training.run.launch import Host
from training.text.counts import size_text


@dataclass(frozen=True)
class RunMachines:
    """A run's nodes, to plan it anew for some of them where the others are gone: what MACHINES of its folder holds."""

    nodes: tuple[NodeHardware, ...]
    known: Known
    """How fast they are."""

    def of(self, names: Sequence[str]) -> PlannedMachines:
        """These nodes, in rank order. Raises ValueError for one that is not among them."""
        by_name = {node.name: node for node in self.nodes}
        if unknown := [name for name in names if name not in by_name]:
            raise ValueError(f"what {', '.join(unknown)} has is not known")
        return planned_on([by_name[name] for name in names], self.known)

    def after(self, earlier: RunMachines) -> RunMachines:
        """These, and those of earlier nodes that are not among them."""
        names = {node.name for node in self.nodes}
        return replace(self, nodes=(*self.nodes, *(node for node in earlier.nodes if node.name not in names)))


def planned_on(nodes: Sequence[NodeHardware], known: Known) -> PlannedMachines:
    """Where a run goes on, in rank order."""
    ranks, per_node = sum(node.slots for node in nodes), max(node.slots for node in nodes)
    return machines_of(rank_cards(nodes), ranks, per_node, min(node.ram_bytes for node in nodes), known)


@dataclass(frozen=True)
class Members:
    """The nodes that a run is to go on with, and what they have: what MEMBERS of its folder holds."""

    hosts: tuple[Host, ...]
    machines: RunMachines


_MACHINES, _MEMBERS = TypeAdapter(RunMachines), TypeAdapter(Members)


def machines_text(machines: RunMachines) -> str:
    """Machines as the JSON of their file."""
    return json.dumps(asdict(machines)) + "\n"


def parse_machines(text: str) -> RunMachines:
    """Machines from their JSON. Raises ValueError where it is none."""
    return read_record(_MACHINES, text)


def members_text(members: Members) -> str:
    """Members as the JSON of their file."""
    return json.dumps(asdict(members)) + "\n"


def parse_members(text: str) -> Members:
    """Members from their JSON; at least one. Raises ValueError where it is none."""
    members = read_record(_MEMBERS, text)
    if not members.hosts:
        raise ValueError("it has no nodes")
    return members


@dataclass(frozen=True)
class Refit:
    """How a run goes on."""

    recipe: Recipe
    missing_gib: float
    """Of a rank's memory; 0 where it fits, infinity where it cannot run at all."""
    reason: str = ""
    """Why the recipe was decided anew, or that nothing fits; empty where it stays and fits."""
    keys: tuple[str, ...] = ()
    """Those that the plan may decide."""

    @property
    def fits(self) -> bool:
        return not self.missing_gib

    @property
    def settings(self) -> str:
        """What the keys are now, for people."""
        now = flat(self.recipe.model_dump())
        return ", ".join(f"{key} = {now[key]}" for key in self.keys)


@dataclass(frozen=True)
class StartPlan:
    """Of the plan of a run's start, what decides how it goes on."""

    shape: ModelShape
    work: Workload
    left: tuple[str, ...]
    """Keys that the user had left to the plan."""

    def refit(self, recipe: Recipe, machines: PlannedMachines, named: Collection[str] = ()) -> Refit:
        """The recipe on these machines; the keys that are `named` for this resume stay."""
        layout = layout_keys(recipe, self.shape, machines.ranks)
        keys = dict.fromkeys((*self.left, *recipe.left_open, *layout))
        return refit(recipe, self.shape, machines, self.work, tuple(key for key in keys if key not in named))


def fewest_nodes(plan: StartPlan, recipe: Recipe, machines: RunMachines) -> int:
    """Of so many of a run's nodes, the first ones, each is needed: it goes on with no fewer."""
    names = [node.name for node in machines.nodes]
    lacks_gib = plan.refit(recipe, machines.of(names)).missing_gib
    while len(names) > 1 and plan.refit(recipe, machines.of(names[:-1])).missing_gib <= lacks_gib:
        names.pop()
    return len(names)


def parse_start_plan(plan: Mapping[str, Any]) -> StartPlan:
    """From the content of plan.json. Raises ValueError where it is damaged."""
    try:
        predicted, data = plan["predicted"], plan["data"]
        left = predicted.get("chosen", {"settings": {}})["settings"]
        work = Workload(data["rows"], data["tokens"], predicted["longest"], data.get("attention_span") or None)
        return StartPlan(read_outline(predicted["shape"]), work, tuple(left))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no plan: {error}") from error


def without_seconds(plan: Mapping[str, Any]) -> str:
    """plan.json without how long its steps take, which were of another recipe or of other machines: no later plan
    learns from them."""
    return json.dumps({**plan, "predicted": {**plan["predicted"], "step_s": None, "model_step_s": None}}) + "\n"


def refit(recipe: Recipe, shape: ModelShape, machines: PlannedMachines, work: Workload, left: Collection[str]) -> Refit:
    """A run's recipe for the machines it goes on with: as it is, while that fits them, but for what the table of a
    strategy that was named for this resume leaves open; else with the keys in `left` decided anew, and why. Where
    nothing fits it stays as it is."""
    keys, now = tuple(left), Search(shape, recipe, machines, work).option(recipe)
    if now.fits:
        left = [key for key in recipe.left_open if key in left]
    lacks = now.refused or f"{size_text(now.missing_gib * 2**30)} of memory are missing a rank"
    missing_gib = math.inf if now.refused else now.missing_gib
    if not left:
        return Refit(recipe, missing_gib, "" if now.fits else lacks, keys)
    now_is = flat(recipe.model_dump())
    if "strategy" in left:
        left = {*left, *(key for key in OF_A_STRATEGY if not now_is[key])}
    emptied = with_changes(recipe, **{key: value for key, value in OF_A_STRATEGY.items() if key in left})
    choice = choose(shape, emptied, machines, work, left)
    if choice.chosen is None:
        return Refit(recipe, missing_gib or math.inf, f"{lacks}, and {choice.reason}", keys)
    values = {key: value for key, value in choice.chosen.values.items() if key in left}
    why = choice.reason if now.fits else f"as it was, {lacks} on {machines.ranks} ranks; {choice.reason}"
    return Refit(with_changes(emptied, **values), 0.0, why, keys)


def layout_keys(recipe: Recipe, shape: ModelShape, ranks: int) -> tuple[str, ...]:
    """The keys of a pipeline's table where so many ranks cannot be its stages; empty where they can."""
    if not recipe.is_pipeline or not cost_of(recipe).misfit(shape, recipe, ranks):
        return ()
    return tuple(f"pipeline.{key}" for key, _ in recipe.pipeline)
