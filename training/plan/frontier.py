"""Which machines to rent, and how many: of all that could be, those that nothing beats in both money and time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

from training.cost.pace import HOUR_S
from training.cost.shape import ModelShape
from training.plan.machines import PlannedMachines, Workload
from training.plan.options import AS_FAST, Option, choose
from training.recipe.recipe import Recipe

SHOWN = 8
MILLION = 1e6


@dataclass(frozen=True)
class Offered:
    """So many machines of one type, before anything is known of how they train."""

    type_name: str
    nodes: int
    machines: PlannedMachines
    in_stock: bool = True


@dataclass(frozen=True)
class RentOption:
    """What they do, in the way that suits them best."""

    offered: Offered
    option: Option

    @property
    def seconds(self) -> float | None:
        """Of the whole run; where nobody said how much there is to learn, of a million tokens."""
        if self.option.minutes is not None:
            return 60 * self.option.minutes
        return None if not self.option.tokens_per_s else MILLION / self.option.tokens_per_s

    @property
    def money(self) -> float | None:
        """For these seconds."""
        price_h = self.offered.machines.price_h
        return None if price_h is None or self.seconds is None else price_h * self.seconds / HOUR_S

    @property
    def expense(self) -> float | None:
        """To compare by: money, or hours of machines where no price is known."""
        if self.offered.machines.price_h is not None:
            return self.money
        return None if self.seconds is None else self.offered.nodes * self.seconds / HOUR_S


def ways(
    shape: ModelShape, recipe: Recipe, offered: Iterable[Offered], work: Workload | None = None
) -> tuple[RentOption, ...]:
    """Each offer by the strategy to take on it; those on which nothing fits are left out, and those with more ranks
    than a step has rows."""
    options = []
    for each in offered:
        if not has_rows(each, recipe):
            continue
        if (chosen := choose(shape, recipe, each.machines, work).chosen) is not None:
            options.append(RentOption(each, chosen))
    return tuple(options)


def has_rows(offered: Offered, recipe: Recipe) -> bool:
    """Whether a step has a row for each rank; one machine is never refused for that."""
    return offered.nodes == 1 or offered.machines.ranks <= recipe.global_batch


def frontier(ways: Iterable[RentOption], most: int = SHOWN) -> tuple[RentOption, ...]:
    """The cheapest first, the fastest last; none is beaten in money and in time by another. Of more than `most` those
    that lie best between the two ends are kept, by the logarithm of their time."""
    timed = [each for each in ways if each.seconds is not None]
    ordered = sorted(timed, key=lambda each: (each.expense, each.seconds, each.offered.nodes, each.offered.type_name))
    unbeaten: list[RentOption] = []
    for each in ordered:
        if not unbeaten or _seconds(each) < _seconds(unbeaten[-1]):
            unbeaten.append(each)
    while len(unbeaten) > max(2, most):
        gaps = [log(_seconds(before) / _seconds(after)) for before, after in pairwise(unbeaten)]
        inner = min(range(1, len(unbeaten) - 1), key=lambda place: gaps[place - 1] + gaps[place])
        del unbeaten[inner]
    return tuple(unbeaten)


def cheaper_in_numbers(ways: Sequence[RentOption]) -> tuple[RentOption, RentOption] | None:
    """Of one type the fewest machines that do, and more of them that are cheaper: the fewest are too small for the
    model to be trained well. None where more machines buy time alone, as far as estimates tell. The pair that differs
    most."""
    fewest: dict[str, RentOption] = {}
    for each in sorted(ways, key=lambda each: each.offered.nodes):
        fewest.setdefault(each.offered.type_name, each)
    pairs = [
        (few, each)
        for each in ways
        for few in [fewest[each.offered.type_name]]
        if few.expense is not None and each.expense is not None and AS_FAST * each.expense < few.expense
    ]
    return max(pairs, key=lambda pair: (pair[0].expense or 0.0) / (pair[1].expense or 1.0), default=None)


def _seconds(way: RentOption) -> float:
    assert way.seconds is not None
    return way.seconds


def rows(ways: Sequence[RentOption], most: int = SHOWN) -> tuple[RentOption, ...]:
    """What is worth showing: the frontier of what is in stock; where that has no times, the frontier of all, and of
    each type in stock the fewest machines that do."""
    in_stock = [each for each in ways if each.offered.in_stock]
    if unbeaten := frontier(in_stock, most):
        return unbeaten
    fewest: dict[str, RentOption] = {}
    cheapest = sorted(in_stock, key=lambda each: (each.offered.machines.price_h or 0.0, each.offered.nodes))
    for each in (each for each in cheapest if each.seconds is None):
        fewest.setdefault(each.offered.type_name, each)
    return (*frontier(ways, most), *fewest.values())[: 2 * most]
