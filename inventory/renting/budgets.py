"""A month's budget: what is left of it, what it refuses, how much a spot machine may cost by it, and until when it
lasts. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from inventory.cloud.values import MACHINE, Instance, Price
from inventory.renting import members
from inventory.renting.cost import Spent, currency_of, hours_between, later_costs
from inventory.shown import length
from training.money import HOUR, MONTH, added, money


@dataclass(frozen=True)
class Purchase:
    """Machines about to be ordered; a price is one machine's an hour."""

    nodes: int
    price_h: float
    hours: float
    currency: str = ""

    @property
    def total(self) -> float:
        return added([self.price_h * self.hours] * self.nodes)


def left(budget: float, paid: Spent, currency: str) -> str:
    """What is left of a month's budget, or by how much it is exceeded; `fab cost` and `fab up` say the same."""
    whole, rest = money(budget, currency, MONTH), budget - paid.committed
    if rest < 0:
        return f"budget: {whole}, exceeded by {money(-rest, currency)}"
    return f"budget: {money(rest)} of {whole} are left"


def over_budget(key: str, budget: float, paid: Spent, wanted: Purchase) -> str:
    """Why a purchase does not fit into what is left of a month's budget; empty where it does, or there is none.

    `key`: what the setting is called.
    """
    rest = budget - paid.committed
    if not budget or wanted.total <= rest:
        return ""
    whole = f"this month's {money(budget, wanted.currency)}"
    said = f"{money(rest, wanted.currency)} of {whole} are left"
    if rest < 0:
        said = f"{whole} are exceeded by {money(-rest, wanted.currency)} already (fab cost says by what)"
    fits = rest / (wanted.nodes * wanted.price_h)
    fewer = "fewer --nodes, or " if wanted.nodes > 1 and rest > 0 else ""
    way = f"--hours {int(fits * 10) / 10:g}, or " if fits >= 0.6 else fewer
    return (
        f"{key}: {wanted.nodes} x {wanted.hours:g} h at {money(wanted.price_h, wanted.currency, HOUR)} is "
        f"{money(wanted.total, wanted.currency)}, but {said}; {way}set a larger {key}"
    )


def over_budget_longer(key: str, budget: float, paid: Spent, longer: Sequence[Instance], until: datetime) -> str:
    """Why machines that stand cannot be kept until then; empty where they can. `paid` has them in it until then."""
    over = paid.committed - budget
    if not budget or over <= 0:
        return ""
    currency, names = currency_of(longer), ", ".join(map(members.label, longer))
    hours = max(hours_between(each.release_at, until) for each in longer if each.release_at)
    more, whole = money(later_costs(longer, until), currency), money(budget, currency)
    rise = ", should spot prices rise to the machines' limits" if paid.risen else ""
    return (
        f"{key}: keeping {names} {length(hours * 3600)} longer costs {more} more, and this month's {whole} would be "
        f"exceeded by {money(over, currency)}{rise}; fewer --hours, or set a larger {key}"
    )


def price_limit(budget: float, paid: Spent, wanted: Purchase, price: Price) -> float | None:
    """The most a spot machine may cost an hour, without its disks, for the budget to bear all that are wanted for as
    long as they are planned: whatever the market does. None where no limit is needed: the list price is borne too.
    """
    if not budget or not wanted.nodes:
        return None
    borne = (budget - paid.committed) / (wanted.nodes * wanted.hours)
    if borne >= price.list:
        return None
    return math.floor(max(0.0, borne - _beside_h(price)) * 1000 + 1e-6) / 1000  # the cloud takes three decimals


def most_h(price: Price, limit: float | None) -> float:
    """What an hour of a spot machine can cost at most, its disks included; `limit` is without them."""
    return price.list if limit is None else min(price.list, limit + _beside_h(price))


def _beside_h(price: Price) -> float:
    """What of a price is for disks and bandwidth, as far as the cloud tells."""
    return sum(part for resource, part in price.parts.items() if resource != MACHINE)


def budget_end(budget: float, paid: Spent, price_h: float, now: datetime) -> datetime | None:
    """When machines that cost `price_h` an hour together will have used the budget up; None without a budget.

    `paid.planned` does not count: it is what is being planned.
    """
    if not budget or price_h <= 0:
        return None
    left = budget - paid.past - paid.running - paid.disks - paid.elsewhere
    return now + timedelta(hours=min(max(0.0, left) / price_h, 24 * 365))
