"""What runs took against what their plans had foreseen: the next plan of such cards, such a network and such a strategy
goes by it. Pure.

Each run leaves one MEASURED in its folder. Plans read the newest ones of the head and of what was fetched from it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from training.cost.cards import rates_of
from training.cost.pace import Rates
from training.events import OffPlan

WARM_UP = 3
"""Steps after each start that do not count: kernels are chosen, memory is taken, files are read."""
LEAST = 5
"""Steps that have to be left of a start."""
NEWEST = 5
"""Runs whose median counts."""
MOST = 3.0
"""By which a plan is corrected at most, either way."""
LIKE = 1.25
"""Within which factor two rates are the same."""
OFF = 0.4
"""Of the planned seconds: a run that is further off says so."""


@dataclass(frozen=True)
class Measured:
    """One run, or its last start."""

    run_id: str
    time: float
    """Seconds since 1970, when it was written."""
    strategy: str
    card: str | None
    """As the driver names it; None where the ranks compute on the CPU."""
    ranks: int
    flops: float | None
    """The card's rate its plan went by."""
    bytes_per_s: float | None
    """The link's."""
    steps: int
    """That were counted."""
    step_s: float
    """Their median."""
    planned_step_s: float | None
    """As the plan said; None where it estimated none."""
    model_step_s: float | None
    """As it would have said without any correction."""
    memory_gib: float
    """The most that any rank held."""
    planned_memory_gib: float | None

    @property
    def factor(self) -> float | None:
        """By which the plan's own formulas were too fast; bounded."""
        if not self.model_step_s:
            return None
        return min(MOST, max(1 / MOST, self.step_s / self.model_step_s))


def counted(rows: Sequence[Mapping[str, Any]], resumed: Iterable[int] = ()) -> list[Mapping[str, Any]]:
    """Of a run's steps those of its last start, its first ones left out. `resumed`: the steps it went on from."""
    begun = max(resumed, default=0)
    return [row for row in rows if "loss" in row and row["step"] > begun + WARM_UP]


def measure(
    run_id: str,
    rows: Sequence[Mapping[str, Any]],
    predicted: Mapping[str, Any],
    *,
    time: float,
    strategy: str,
    ranks: int,
    resumed: Iterable[int] = (),
) -> Measured | None:
    """What came of a run; None where too few undisturbed steps are left, or it ran on other ranks than were planned."""
    left = counted(rows, resumed)
    if len(left) < LEAST or predicted.get("ranks") != ranks:
        return None
    rates = predicted.get("rates") or {}
    planned = predicted.get("step_s")
    return Measured(
        run_id=run_id,
        time=time,
        strategy=strategy,
        card=predicted.get("card"),
        ranks=ranks,
        flops=rates.get("flops"),
        bytes_per_s=rates.get("bytes_per_s"),
        steps=len(left),
        step_s=statistics.median(row["step_s"] for row in left),
        planned_step_s=planned,
        model_step_s=predicted.get("model_step_s", planned),
        memory_gib=max(row["memory_gib"] for row in left),
        planned_memory_gib=predicted.get("memory_gib"),
    )


@dataclass(frozen=True)
class Correction:
    """What a plan's seconds are multiplied with, and because of which runs."""

    factor: float
    run_ids: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"x {self.factor:.2f}, as {', '.join(self.run_ids)} took"


@dataclass(frozen=True)
class Corrections:
    """For one kind of machines."""

    by_strategy: Mapping[str, Correction] = field(default_factory=dict)

    def of(self, strategy: str) -> Correction | None:
        """Its own; else the median of the others': what is known of these cards and this network, so that a strategy
        does not seem fast because nobody has tried it."""
        if found := self.by_strategy.get(strategy):
            return found
        if not self.by_strategy:
            return None
        others = self.by_strategy.values()
        return Correction(
            statistics.median(each.factor for each in others), tuple(i for each in others for i in each.run_ids)
        )


NONE = Corrections()
"""Where nothing was measured."""


def corrections(runs: Iterable[Measured], card: str | None, rates: Rates, ranks: int) -> Corrections:
    """What runs on such machines say that were planned by the same rates: of each strategy the newest runs' median."""
    by_strategy: dict[str, list[Measured]] = {}
    for each in sorted(runs, key=lambda each: each.time, reverse=True):
        if each.factor is not None and _alike(each, card, rates, ranks):
            by_strategy.setdefault(each.strategy, []).append(each)
    found = {}
    for strategy, its in by_strategy.items():
        factors = [each.factor for each in its[:NEWEST] if each.factor is not None]
        found[strategy] = Correction(statistics.median(factors), tuple(each.run_id for each in its[:NEWEST]))
    return Corrections(found)


def _alike(run: Measured, card: str | None, rates: Rates, ranks: int) -> bool:
    if (run.card is None) != (card is None) or (run.ranks == 1) != (ranks == 1):
        return False
    same_card = run.card == card or (run.card and card and rates_of(run.card) is rates_of(card) is not None)
    same_link = ranks == 1 or _like(run.bytes_per_s, rates.bytes_per_s)
    return bool(same_card) and _like(run.flops, rates.flops) and same_link


def _like(one: float | None, other: float | None) -> bool:
    return bool(one and other and 1 / LIKE <= one / other <= LIKE)


class PaceWatch:
    """Takes each step's seconds while a run goes; says once that they are far from what was planned."""

    def __init__(self, planned_s: float | None) -> None:
        self._planned_s, self._taken, self._said = planned_s, list[float](), False

    def take(self, step: int, step_s: float) -> OffPlan | None:
        self._taken.append(step_s)
        left = self._taken[WARM_UP:]
        if self._said or not self._planned_s or len(left) < LEAST:
            return None
        median = statistics.median(left)
        if abs(median / self._planned_s - 1) <= OFF:
            return None
        self._said = True
        return OffPlan(step, self._planned_s, median)


def text(measured: Measured) -> str:
    """As the JSON of MEASURED."""
    return json.dumps(asdict(measured), indent=1) + "\n"


def parse(content: str) -> Measured:
    """What a run left. Raises ValueError where it is none."""
    found = json.loads(content)
    try:
        made = Measured(**{name: value for name, value in found.items() if name in Measured.__dataclass_fields__})
    except (AttributeError, TypeError) as error:
        raise ValueError(f"it tells nothing of a run: {error}") from error
    numbers = (made.time, made.step_s, made.memory_gib, made.ranks, made.steps)
    known = (made.flops, made.bytes_per_s, made.planned_step_s, made.model_step_s, made.planned_memory_gib)
    if not all(_above_0(each) for each in numbers) or not all(each is None or _above_0(each) for each in known):
        raise ValueError("a number in it is not above 0")
    return made


def _above_0(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
