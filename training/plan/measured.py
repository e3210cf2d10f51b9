"""What runs took against what their plans had foreseen: the next plan of such cards, such a network and such a strategy
goes by it. Pure.

Each run leaves one MEASURED in its folder. Plans read the newest ones of the head and of what was fetched from it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.cost.cards import same_kind
from training.cost.pace import Rates
from training.events import OffPlan
from training.plan.record import ANY, BYTES_PER_S, FLOPS, read

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
LEAST_PLANNED_S = 0.5
"""Of a step as the formulas have it: in a shorter one what a step costs whatever its size (Python, DeepSpeed, latency)
is what takes the time, and says nothing of how fast the machines are."""
OFF = 0.4
"""Of the planned seconds: a run that is further off says so."""


@dataclass(frozen=True)
class MeasuredRun:
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
    dtype: str
    """The recipe's."""
    tuning: str

    @property
    def factor(self) -> float | None:
        """By which the plan's own formulas were too fast; bounded. None where its steps are too short to tell."""
        if self.model_step_s is None or self.model_step_s < LEAST_PLANNED_S:
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
    dtype: str,
    tuning: str,
    resumed: Iterable[int] = (),
) -> MeasuredRun | None:
    """What came of a run; None where too few undisturbed steps are left, or it ran on other ranks than were planned."""
    left = counted(rows, resumed)
    if len(left) < LEAST or predicted.get("ranks") != ranks:
        return None
    rates = predicted.get("rates") or {}
    planned = predicted.get("step_s")
    return MeasuredRun(
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
        dtype=dtype,
        tuning=tuning,
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

    runs: tuple[MeasuredRun, ...] = ()
    """On such machines, by the same rates; the newest first."""

    def of(self, strategy: str, dtype: str, tuning: str) -> Correction | None:
        """Its own; else the median of the others': what is known of these cards and this network, so that a strategy
        does not seem fast because nobody has tried it."""
        by_strategy = self.by_strategy(dtype, tuning)
        if strategy in by_strategy or not by_strategy:
            return by_strategy.get(strategy)
        others = by_strategy.values()
        return Correction(
            statistics.median(each.factor for each in others), tuple(i for each in others for i in each.run_ids)
        )

    def by_strategy(self, dtype: str, tuning: str) -> dict[str, Correction]:
        """Of each strategy the newest runs' median; of runs that computed and tuned alike."""
        runs: dict[str, list[MeasuredRun]] = {}
        for each in self.runs:
            if (each.dtype, each.tuning) == (dtype, tuning):
                runs.setdefault(each.strategy, []).append(each)
        return {strategy: _correction(its[:NEWEST]) for strategy, its in runs.items()}


def _correction(runs: Sequence[MeasuredRun]) -> Correction:
    factors = [each.factor for each in runs if each.factor is not None]
    return Correction(statistics.median(factors), tuple(each.run_id for each in runs))


NONE = Corrections()
"""Where nothing was measured."""


def corrections(runs: Iterable[MeasuredRun], card: str | None, rates: Rates, ranks: int) -> Corrections:
    """What runs on such machines say that were planned by the same rates, and long enough."""
    telling = (each for each in runs if each.factor is not None and _alike(each, card, rates, ranks))
    return Corrections(tuple(sorted(telling, key=lambda each: each.time, reverse=True)))


def _alike(run: MeasuredRun, card: str | None, rates: Rates, ranks: int) -> bool:
    same_link = ranks == 1 or _like(run.bytes_per_s, rates.bytes_per_s)
    same_place = same_kind(run.card, card) and (run.ranks == 1) == (ranks == 1)
    return same_place and _like(run.flops, rates.flops) and same_link


def _like(one: float | None, other: float | None) -> bool:
    return bool(one and other and 1 / LIKE <= one / other <= LIKE)


class PaceWatch:
    """Takes each step's seconds while a run goes; says once that they are far from what was planned. Of steps too short
    to learn from it says nothing."""

    def __init__(self, planned_s: float | None) -> None:
        self._planned_s, self._taken, self._said = planned_s, list[float](), False

    def take(self, step: int, step_s: float) -> OffPlan | None:
        self._taken.append(step_s)
        left = self._taken[WARM_UP:]
        if self._said or not self._planned_s or self._planned_s < LEAST_PLANNED_S or len(left) < LEAST:
            return None
        median = statistics.median(left)
        if abs(median / self._planned_s - 1) <= OFF:
            return None
        self._said = True
        return OffPlan(step, self._planned_s, median)


def text(measured: MeasuredRun) -> str:
    """As the JSON of MEASURED."""
    return json.dumps(asdict(measured), indent=1) + "\n"


RANGES = {"flops": FLOPS, "bytes_per_s": BYTES_PER_S} | dict.fromkeys(("planned_step_s", "model_step_s"), (0.0, ANY[1]))
"""A plan's seconds were once rounded, to 0 where they were short."""


def parse(content: str) -> MeasuredRun:
    """What a run left. Raises ValueError where it is none."""
    return read(MeasuredRun, content, RANGES)
