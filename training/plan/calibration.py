"""What was measured: by `fab prove` of a cluster, by runs of their own plans. Later plans use it. Pure.

calibration.json lies on the head beside the runs; each run leaves a MEASURED in its folder. Both may be damaged, so
every value is checked.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from training.cost.cards import Rates, same_kind
from training.run.events import OffPlan
from training.text.files import bounded_json
from training.text.problems import first_problem

T = TypeVar("T")
Amount = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, strict=True)]
Seconds = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
"""Of a plan: they were once rounded, to 0 where they were short."""
Flops = Annotated[float, Field(ge=1e9, le=1e17, strict=True)]
"""A second: from a core of an old CPU to far above any card."""
BytesPerS = Annotated[float, Field(ge=1e4, le=1e13, strict=True)]
"""From a telephone line to above any card's memory."""


def read_record(kind: TypeAdapter[T], content: str) -> T:
    """A record from its JSON; what it does not know is left out. Raises ValueError for what is none, with the first
    value that cannot be."""
    try:
        return kind.validate_python(bounded_json(content, float))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


# What `fab prove` measured of a cluster: the plan goes by it instead of by its table of cards.
#
# The file lies on the head beside the runs and in the folder of the run that made it. It is of one kind of card and one
# number of ranks, and says nothing of others.

FILE = "calibration.json"
OF_MATMUL = 0.6
"""Of a card's measured matrix rate, what LoRA training sustains: 0.55 to 0.66 where both were published (A100, 4090,
3090)."""


@dataclass(frozen=True)
class Ranks:
    """Whose link is asked for."""

    cluster: str
    count: int
    cards: tuple[str, ...]
    """Their kinds; none where they compute on the CPU."""
    nodes: frozenset[str] = frozenset()
    """Their names; none where they are all on this machine."""

    def are_on(self, nodes: Collection[str]) -> bool:
        """Whether these are their nodes; what was measured before names were kept has none, and may be theirs."""
        return not nodes or not self.nodes or set(nodes) == self.nodes


@dataclass(frozen=True)
class Calibration:
    """The slowest rank's rates: a step lasts as long as that one's."""

    run_id: str
    cluster: str
    time: Amount
    """Seconds since the epoch, on the machine that asked."""
    world_size: Count
    card: str | None
    """As the driver names it; None where the ranks compute on the CPU."""
    matmul_flops: Flops
    """In bfloat16; in float16 on a card that has none."""
    memory_bytes_per_s: BytesPerS
    link_bytes_per_s: BytesPerS | None
    """All-gather's busbw; None for a single rank."""
    own_loss_s: Amount | None = None
    """Seconds of our own loss on a chunk, of the rank that was slowest with it; None where only it was there."""
    liger_loss_s: Amount | None = None
    """Of Liger's on the same chunk; None where it was not there, or not our loss."""
    ram_bytes: Amount | None = None
    """Of the node that has least."""
    nodes: tuple[str, ...] = ()
    """That were measured; none in what was written before their names were kept."""

    def sustained(self, card: str | None) -> float | None:
        """FLOP/s that training sustains on such a card, or where ranks compute on the CPU (None); None for another
        kind."""
        return OF_MATMUL * self.matmul_flops if card == self.card else None

    def prefers_own_loss(self, card: str) -> bool:
        """Whether our own loss was faster than Liger's on such a card."""
        if card != self.card or self.own_loss_s is None or self.liger_loss_s is None:
            return False
        return self.own_loss_s < self.liger_loss_s

    def ram(self, card: str | None) -> float | None:
        """Bytes of RAM of a node with such cards, or without (None); None for another kind."""
        return self.ram_bytes if same_kind(card, self.card) else None

    def link(self, whose: Ranks) -> float | None:
        """Bytes a second between these ranks; None where others were measured."""
        same = (whose.cluster, whose.count) == (self.cluster, self.world_size) and whose.are_on(self.nodes)
        alike = all(same_kind(self.card, each) for each in whose.cards or (None,))
        return self.link_bytes_per_s if same and alike else None


def calibration_file(runs: Path) -> str:
    """Its place on a head, or on this machine for `--here`."""
    return str(runs / FILE)


def calibration_text(calibration: Calibration) -> str:
    """As the JSON of calibration.json."""
    return json.dumps(asdict(calibration), indent=1) + "\n"


CALIBRATION = TypeAdapter(Calibration)


def parse_calibration(content: str) -> Calibration:
    """The calibration in a JSON text. Raises ValueError where it is none."""
    return read_record(CALIBRATION, content)


# What runs took against what their plans had foreseen: the next plan of such cards, such a network and such a strategy
# goes by it.
#
# Each run leaves one MEASURED in its folder. Plans read the newest ones of the head and of what was fetched from it.

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
    time: Amount
    """Seconds since 1970, when it was written."""
    strategy: str
    card: str | None
    """As the driver names it; None where the ranks compute on the CPU."""
    ranks: Count
    flops: Flops | None
    """The card's rate its plan went by."""
    bytes_per_s: BytesPerS | None
    """The link's."""
    steps: Count
    """That were counted."""
    step_s: Amount
    """Their median."""
    planned_step_s: Seconds | None
    """As the plan said; None where it estimated none."""
    model_step_s: Seconds | None
    """As it would have said without any correction."""
    memory_gib: Amount
    """The most that any rank held."""
    planned_memory_gib: Amount | None
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
    recipe: Mapping[str, Any],
    *,
    time: float,
    ranks: int,
    resumed: Iterable[int] = (),
) -> MeasuredRun | None:
    """What came of a run; None where too few undisturbed steps are left, or it ran on other ranks than were planned.
    Raises KeyError where the recipe is not whole."""
    left = counted(rows, resumed)
    if len(left) < LEAST or predicted.get("ranks") != ranks:
        return None
    rates = predicted.get("rates") or {}
    planned = predicted.get("step_s")
    return MeasuredRun(
        run_id=run_id,
        time=time,
        strategy=recipe["strategy"],
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
        dtype=recipe["dtype"],
        tuning=recipe["tuning"],
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


NO_CORRECTIONS = Corrections()
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


def measured_text(measured: MeasuredRun) -> str:
    """As the JSON of MEASURED."""
    return json.dumps(asdict(measured), indent=1) + "\n"


MEASURED_RUN = TypeAdapter(MeasuredRun)


def parse_measured(content: str) -> MeasuredRun:
    """What a run left. Raises ValueError where it is none."""
    return read_record(MEASURED_RUN, content)
