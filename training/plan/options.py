"""What each strategy would do on given machines; which to take: the fastest that fits, of equals the simplest. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Literal

from training.cost.memory import GIB, Memory, micro_batch_tokens, packed_weights, with_reserve
from training.cost.pace import HOUR_S, Pace, pace, validation_steps
from training.cost.schedule import Split
from training.cost.shape import ModelShape
from training.cost.strategies import STRATEGIES, cost_of
from training.cost.zero import MicroBatch, part_misfit
from training.plan.layout import Staging
from training.plan.machines import PlannedMachines, Workload, assumed, stood_in
from training.recipe.reading import with_changes
from training.recipe.recipe import LEANEST_WHOLE, LEFT_TO_THE_PLAN, Recipe, RecipeError
from training.recipe.strategy_rules import needs
from training.recipe.tables import NF4, PipelineTable
from training.text.counts import size_text

AS_FAST = 1.03
"""Seconds by which a simpler strategy may be slower and is taken all the same: estimates are no better than that."""
HARDLY = 0.0005
"""Below this part of a step nothing is slower: it would be shown as 0.0 %."""
FASTER = 1.1
"""By which a larger card has to be faster for memory to be what bounds."""
FULL = 2048
"""Tokens of a micro-batch from which on a card is as fast as the formulas say, which know nothing of small kernels."""
LEAST = 512
"""Tokens of a micro-batch below which the formulas say too little to choose by, where more fit."""
INSTANT_S = 0.05
"""Of a step, below which all are as fast: the formulas know nothing of Python and latency, which it then goes by."""

Bound = Literal["compute", "link", "memory", ""]


@dataclass(frozen=True)
class Option:
    """What a strategy does at its best, with what decides it; None where a rate or a price is not known."""

    strategy: str
    micro_batch: int
    checkpointed: int
    """Layers that are computed again."""
    layers: int
    needs_gib: float
    has_gib: float | None
    missing_gib: float
    """Of the card, or of a node's RAM; 0 where it fits."""
    refused: str
    """Why the recipe cannot be run with it at all; empty where it can."""
    step_s: float | None
    tokens_per_s: float | None
    """Of all ranks together."""
    bound: Bound
    rests_on: str
    """The weakest number behind its times; empty where all were measured."""
    minutes: float | None
    """Of the whole run; None without data, unless the recipe counts steps."""
    money: float | None
    money_per_million: float | None
    """Of tokens."""
    order_s: float
    """Seconds of a step, with a stand-in for a rate that is not known: to choose by, not to show."""
    split: Split | None = None
    """How the layers lie in stages; None where a rank computes all of them."""
    copies: int = 1
    """Of the model, each with its part of a step's rows."""

    @property
    def fits(self) -> bool:
        return not self.missing_gib and not self.refused

    @property
    def values(self) -> dict[str, Any]:
        """The recipe's keys that make it so, dotted where they are a table's."""
        own = dict(zip(LEFT_TO_THE_PLAN, (self.strategy, self.micro_batch, self.checkpointed), strict=True))
        if self.split is None:
            return own
        lists = {key: list(values) for key, values in asdict(self.split).items()}
        return own | {f"pipeline.{key}": value for key, value in {"stages": self.split.stages, **lists}.items()}


@dataclass(frozen=True)
class Choice:
    """All options, the recipe as it stands, and the option to take."""

    options: tuple[Option, ...]
    as_it_stands: Option
    chosen: Option | None
    """None where nothing fits."""
    reason: str


def choose(
    shape: ModelShape,
    recipe: Recipe,
    machines: PlannedMachines,
    work: Workload | None = None,
    free: Collection[str] = LEFT_TO_THE_PLAN,
) -> Choice:
    """The best of each strategy; of the recipe's keys those in `free` are chosen, whatever it says of them."""
    search = Search(shape, recipe, machines, work, free)
    options = tuple(search.best(name) for name in (STRATEGIES if "strategy" in free else [recipe.strategy]))
    chosen, reason = _chosen(options)
    fitting = [option for option in options if option.fits]
    if len(fitting) > 1 and fitting[0].step_s is None and (assumption := assumed(machines)):
        reason += f", {assumption}"
    if chosen is None and not all(option.refused for option in options):
        reason += in_four_bits(search)
    return Choice(options, search.option(recipe), chosen, reason)


def in_four_bits(search: Search) -> str:
    """What would fit if the frozen layers were rounded; empty where nothing would, or they are."""
    if (rounded_search := rounded(search)) is None:
        return ""
    names = STRATEGIES if "strategy" in search.free else [search.recipe.strategy]
    fitting = next((option for name in names if (option := rounded_search.best(name)).fits), None)
    words = "its frozen layers rounded to four bits each; --set base_precision=nf4"
    return f"; {fitting.strategy} would fit with {words}" if fitting else ""


def rounded(search: Search) -> Search | None:
    """With the frozen layers in four bits each; None where they are, or the recipe takes none beside what it says."""
    recipe = search.recipe
    if recipe.base_precision == NF4:
        return None
    whole = {"strategy": LEANEST_WHOLE} if "strategy" in search.free else {}  # its own may divide them
    try:
        return replace(search, recipe=with_changes(recipe, base_precision=NF4, **whole))
    except RecipeError:
        return None


def _chosen(options: tuple[Option, ...]) -> tuple[Option | None, str]:
    fitting = [option for option in options if option.fits]
    least = min(options, key=lambda option: (bool(option.refused), option.missing_gib))
    only = len(options) == 1  # the recipe names it
    if least.refused:
        return None, least.refused if only else f"no strategy can run this recipe: {least.refused}"
    if not fitting:
        who = least.strategy if only else f"{least.strategy}, which needs least,"
        return None, f"nothing fits: {who} lacks {size_text(least.missing_gib * GIB)}"
    if only:
        return fitting[0], f"{fitting[0].strategy} is what the recipe names, in the fastest way that fits"
    if len(fitting) == 1:
        return fitting[0], f"{fitting[0].strategy} is the only one that fits"
    fastest = min(fitting, key=lambda option: option.order_s)
    as_fast = max(AS_FAST * fastest.order_s, INSTANT_S)
    chosen = next(option for option in fitting if option.order_s <= as_fast)
    slower = chosen.order_s / fastest.order_s - 1
    if slower > AS_FAST - 1:
        return chosen, f"{chosen.strategy} is the simplest that fits, and a step too short for another to be faster"
    if slower >= HARDLY:
        return chosen, f"{chosen.strategy} is simpler than {fastest.strategy} and only {slower:.1%} slower"
    if chosen != fastest and slower > 0:
        return chosen, f"{chosen.strategy} is simpler than {fastest.strategy} and as fast"
    return chosen, f"{chosen.strategy} is the fastest that fits"


@dataclass(frozen=True)
class Search:
    """Through the ways in which a recipe's model can be trained on machines."""

    shape: ModelShape
    recipe: Recipe
    machines: PlannedMachines
    work: Workload | None = None
    free: Collection[str] = LEFT_TO_THE_PLAN

    def best(self, strategy: str) -> Option:
        """The fastest way of a strategy that fits, else the one that lacks least."""
        option = self._with(-self.machines.spare_bytes)._fastest(strategy)
        if option.missing_gib:
            option = self._fastest(strategy)
        if option.missing_gib:
            return replace(option, bound="memory")
        held_back = option.order_s >= FASTER * self._with(inf)._fastest(strategy).order_s
        return replace(option, bound="memory") if held_back and option.bound else option

    def _with(self, more: float) -> Search:
        return replace(self, machines=self.machines.with_room(more))

    def _fastest(self, strategy: str) -> Option:
        """Of equally fast ways the one whose micro-batch fills the card's kernels, and not more memory than that."""
        ways = [self.option(way) for size in self._micro_batches() for way in self._ways(strategy, size)]
        row = self._micro(self.recipe).tokens // self.recipe.micro_batch
        return min(
            ways,
            key=lambda way: (
                way.missing_gib,
                -min(row * way.micro_batch, LEAST),
                float(f"{way.order_s:.5g}"),
                -min(row * way.micro_batch, FULL),
                way.needs_gib,
            ),
        )

    def _micro_batches(self) -> Iterator[int]:
        size = 1 if "micro_batch" in self.free else self.recipe.micro_batch
        yield size
        while "micro_batch" in self.free and self.machines.ranks * (size := 2 * size) <= self.recipe.global_batch:
            yield size

    def _ways(self, strategy: str, micro_batch: int) -> Iterable[Recipe]:
        """Of a strategy with such micro-batches those worth comparing."""
        base = self.recipe.model_copy(update={"strategy": strategy, "micro_batch": micro_batch})
        if cost_of(base).split(self.shape, base, self.machines.ranks) is None:
            return [self._leanest(base)]
        return Staging(self.shape, base, self.machines, self._micro(base), self.free).recipes()

    def _leanest(self, base: Recipe) -> Recipe:
        """With the fewest checkpointed layers that fit, since each costs time; all of them where none fits. From one on
        each more needs less memory; the first one is computed beside what the others keep."""
        if "gradient_checkpointing" not in self.free:
            return base

        def checkpointed(layers: int) -> Recipe:
            return base.model_copy(update={"gradient_checkpointing": layers})

        def fits(layers: int) -> bool:
            return not self._lacks(checkpointed(layers))[0]

        some = range(1, self.shape.layers)
        return checkpointed(0 if fits(0) else 1 + bisect_left(some, True, key=fits))

    def _micro(self, recipe: Recipe) -> MicroBatch:
        """Where each is as long as it can get."""
        work = self.work
        tokens = micro_batch_tokens(recipe, work.longest if work else recipe.row_length)
        return MicroBatch(tokens, recipe.max_length if work is None or work.span is None else work.span)

    def _lacks(self, recipe: Recipe) -> tuple[float, Memory, float]:
        """Bytes that are missing to the rank that lacks most, 0 where none does, what that rank holds and what its card
        has."""
        machines = self.machines
        each = cost_of(recipe).memories(self.shape, recipe, machines.ranks, self._micro(recipe).tokens)
        lacks, worst = machines.tightest(each)
        return max(0.0, lacks), each[worst], machines.by_stage(len(each))[worst].has_bytes

    def option(self, recipe: Recipe) -> Option:
        """What a recipe does as it stands."""
        cost, machines = cost_of(recipe), self.machines
        gpu = machines.card is not None
        never = part_misfit(self.shape, recipe)  # said before what another strategy would mend
        refused = never or needs(recipe, gpu) or cost.misfit(self.shape, recipe, machines.ranks)
        if refused:  # the figures are then those of no table at all
            recipe = recipe.model_copy(update={"pipeline": PipelineTable()})
        rates, micro = machines.rates, self._micro(recipe)
        missing, memory, has = self._lacks(recipe)
        split = cost.split(self.shape, recipe, machines.ranks)
        known = stood_in(machines).at_precision(recipe.dtype, gpu)
        speed = pace(self.shape, recipe, machines.ranks, micro.tokens, known, span=micro.span)
        if correction := machines.corrections.of(recipe.strategy, recipe.dtype, recipe.tuning):
            speed = speed.scaled(correction.factor)
        assert speed.step_s is not None and speed.compute_s is not None and speed.wire_s is not None
        sure = rates.flops is not None and (rates.bytes_per_s is not None or not speed.wire_gb)
        sure = sure and (rates.memory_bytes_per_s is not None or not packed_weights(self.shape, recipe))
        per_s = recipe.global_batch * micro.tokens / recipe.micro_batch / speed.step_s if sure else None
        minutes = self._minutes(speed) if sure else None
        price_s = None if machines.price_h is None else machines.price_h / HOUR_S
        return Option(
            strategy=recipe.strategy,
            micro_batch=recipe.micro_batch,
            checkpointed=sum(split.checkpointed) if split else recipe.checkpointed(self.shape.layers),
            layers=self.shape.layers,
            needs_gib=with_reserve(memory.held(gpu), gpu) / GIB,
            has_gib=None if has == inf else has / GIB,
            missing_gib=missing / GIB,
            refused=refused,
            step_s=speed.step_s if sure else None,
            tokens_per_s=per_s,
            bound="" if not sure else "link" if speed.wire_s > speed.compute_s else "compute",
            rests_on=machines.weakest if sure else "",
            minutes=minutes,
            money=None if minutes is None or price_s is None else price_s * 60 * minutes,
            money_per_million=None if per_s is None or price_s is None else price_s / per_s * 1e6,
            order_s=speed.step_s,
            split=split,
            copies=cost.replicas(recipe, machines.ranks),
        )

    def _minutes(self, speed: Pace) -> float | None:
        """Of the whole run, its looks at the validation split included."""
        if self.work is None and self.recipe.steps is None:
            return None
        rows = self.work.rows if self.work else 0
        total = self.recipe.total_steps(rows)
        return speed.minutes(total + validation_steps(self.recipe, total, rows))
