"""What the checks look at, and what each of them answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from training.cost.memory import Memory
from training.cost.pace import Pace, validation_steps
from training.plan.facts import Facts
from training.plan.fewer import Fewer
from training.plan.four_bits import Rounded
from training.plan.machines import RankCard
from training.plan.measured import Correction
from training.recipe import Recipe

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Check:
    """One row: what was looked at, what was found, and what to do about it."""

    name: str
    severity: Severity
    value: str
    cure: str = ""
    estimated: bool = False
    """A judgement or an estimate, which `--anyway` overrules; the rest are facts."""

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.value}{f'; {self.cure}' if self.cure else ''}"


@dataclass(frozen=True)
class Situation:
    """What the checks look at."""

    recipe: Recipe
    facts: Facts
    memory: Memory
    """Of the rank whose card is filled most."""
    pace: Pace
    total_steps: int
    card: RankCard
    """That rank's, or its share of the RAM."""
    smaller: str = ""
    """Changes that would make it fit, as `--set` takes them; empty where none would."""
    sparing: str = ""
    """What would spare a slow network; empty where it is not slow."""
    four_bits: Rounded | None = None
    """Where the frozen layers in four bits each would be much faster."""
    flops_from: str = ""
    """Where the card's rate is known from; empty where it is not."""
    correction: Correction | None = None
    """Of its seconds, by what runs took."""
    fewer: Fewer | None = None
    """Of the nodes, that would be cheaper."""

    @property
    def epochs(self) -> float:
        return self.total_steps * self.recipe.global_batch / max(1, self.facts.report["rows"])

    @property
    def minutes(self) -> float | None:
        looks = validation_steps(self.recipe, self.total_steps, self.facts.report["rows"])
        return self.pace.minutes(self.total_steps + looks)
