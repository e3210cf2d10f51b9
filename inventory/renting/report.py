"""What `fab up`, `down`, `cost` and `status` print of rented machines and money."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from inventory.cloud.errors import CloudError
from inventory.cloud.opening import open_cloud
from inventory.cloud.port import Cloud
from inventory.cloud.values import DATA_DISK, HOURS_A_MONTH, Instance, Price
from inventory.renting import cost, elsewhere, ledger, members, tags
from inventory.renting.disks import waiting_for
from inventory.renting.down import DownPlan
from inventory.renting.ledger import holdings
from inventory.renting.money_view import cost_table, disk_label, month_line, past_table, released_at, stays_lines
from inventory.renting.offers import Quote
from inventory.renting.plan import UpPlan
from inventory.renting.recovery import WayBack, newest
from inventory.settings import Settings
from inventory.shown import clock, length
from inventory.terminal import console, table
from training.text.counts import HOUR, MONTH, added, bare, money, rounded


def open_account(settings: Settings, record: Path | None = None) -> Cloud:
    """The cluster's region, after the first line of every command about what is rented: whose account it is, by its
    last digits. `record`: as `open_cloud` has it. Raises CloudError, RentError; SettingsError where nothing is rented.
    """
    cloud = open_cloud(settings, record)
    display(f"account ...{cloud.account[-4:]}" if cloud.account else "account: the cloud does not tell which")
    return cloud


def report_cost(cloud: Cloud, settings: Settings) -> None:
    """Machines so far and until they are released, disks and snapshots a month, past machines, the budget; what is
    there is written into the ledger."""
    resources = holdings(cloud, settings)
    instances, disks, snapshots = resources.machines, resources.disks, resources.snapshots
    with suppress(CloudError):  # then there is no price to show
        instances = cost.with_price_tags(cloud, settings, instances)
    now = cloud.now()
    book = ledger.Ledger.of(cloud, settings)
    past, currency = book.record(instances, now), book.currency
    book.record_kept(disks, snapshots, now)
    outlive = [d for d in ledger.stays(disks) if d.instance_id]
    months = cost.disk_months(cloud, cost.loose(disks))
    with suppress(CloudError):  # then there is no price to show
        months |= cost.disk_months(cloud, outlive)
    spent = cost.spent(instances, past, cost.month_shares(cost.loose(disks), months, past, now), now, currency)
    display(*resources.notes, *resources.elsewhere)
    if instances:
        display(cost_table(instances, now))
    else:
        left = WayBack(waiting_for(disks, {1}).get(1), newest(snapshots))
        display(f"the cluster {settings.name!r} has no machines in {cloud.region_id}; {left.without_machines()}")
    display(*stays_lines(cost.loose(disks), months, snapshots, settings, currency))
    display(*(each.line for each in elsewhere.billed_elsewhere(cloud, settings)))
    if table := past_table(past, settings.name, now):
        display(table)
    display(month_line(spent, currency))
    budget = settings.rental.budget
    if budget:
        display(cost.budget_left(budget, spent, currency))
    if line := cost.persistent_disks_line(outlive, months, instances, currency):
        display(line)


def show_machines(settings: Settings) -> tuple[Instance, ...]:
    """The rented machines, after their states and release times, and what is billed elsewhere. Raises CloudError."""
    cloud = open_account(settings)
    instances = cloud.instances(tags=tags.of_cluster(settings.name))
    if instances:
        display(machines_table(instances, settings, cloud.now()))
        if stopped := [members.label(each) for each in instances if each.is_stopped]:
            display(f"stopped: {', '.join(stopped)}; fab up starts what is stopped")
        if lacking := members.lacking(members.names(members.reachable(instances)), settings):
            display(f"{lacking.message}: {lacking.mend}")
        display(*elsewhere.other_billing(cloud, settings))  # where there are none, why the command ends says it
    return instances


def elsewhere_lines(settings: Settings) -> tuple[str, ...]:
    """The same of what is billed elsewhere, for a command that works on the machines; none where none are rented."""
    return elsewhere.other_billing(open_cloud(settings), settings) if settings.is_rented else ()


# What renting looks like in a terminal: offers, machines and money. rich is imported where it is used.

FREE = "free: VPC, vSwitch, security group, key pair, traffic between the machines and into them"
BILLED = (
    "billed: each machine by the second with its system disk and data disk (in the price above), "
    "traffic out by GB, kept disks and snapshots by the month"
)
SHOWN_OFFERS = 8


def display(*what: Any) -> None:
    """Print tables and lines."""
    terminal = console()
    for each in what:
        terminal.print(each, soft_wrap=isinstance(each, str))


def up_table(plan: UpPlan) -> Any:
    """What would be ordered, where, at which price, until when; for `display` or any rich console."""
    return Group(*(Text(each) if isinstance(each, str) else each for each in _up(plan)))


def _up(plan: UpPlan) -> list[Any]:
    if not plan.numbers:
        done = f"to start: {', '.join(map(members.label, plan.stopped))}" if plan.stopped else "none is missing"
        return [*plan.notes, f"{_there(plan)}; {done}", *_later_lines(plan)]
    spot_price = "spot price 3 days (low/median/high)"
    offers = table(
        [
            "try",
            "type",
            "zone",
            f"{plan.quotes[0].price.currency} {HOUR}",
            "what",
            spot_price,
            "30 days: reclaimed",
            "note",
        ],
        [_offer_row(n, quote) for n, quote in enumerate(plan.quotes[:SHOWN_OFFERS], start=1)],
        {"what", "30 days: reclaimed", "note"},
    )
    best = plan.quotes[0].price
    hour, listed, names = plan.hour, best.list * len(plan.numbers) - plan.reused_disks_h, ", ".join(plan.reused_disks)
    less = f" - {_h(plan.reused_disks_h)} for the kept disk of {names}" if names else ""
    spot = "spot machines, which the cloud may take back" if plan.is_spot else "machines by the hour"
    lines = [
        f"{_there(plan)}; to make: {', '.join(f'te{k}' for k in plan.numbers)} ({spot})",
        offers,
        *_stock_lines(plan),
        f"price: {len(plan.numbers)} x {_h(best.trade)}{less} = {money(hour, best.currency, HOUR)}, "
        f"{money(plan.total, best.currency)} {plan.until}"
        + ("" if rounded(hour * plan.wish.hours) == rounded(plan.total) else ", from prices that are not rounded")
        + (f" (list price {money(listed, best.currency, HOUR)})" if best.list > best.trade else "")
        + (", and the kept disks as until now" if less else ""),
        *_parts_lines(best, len(plan.numbers)),
        BILLED,
        FREE,
        f"ssh is open to {', '.join(plan.ssh_from)} only",
        _release_line(plan),
        *_persistent_disk_lines(plan, best),
        *([_extended_line(plan)] if plan.extended else []),
    ]
    lines += _budget_lines(plan, best.currency)
    lines += [_limit_line(plan, best)] if plan.budget and plan.is_spot else []
    lines += [f"te{k} gets its kept disk {disk.disk_id} again" for k, disk in sorted(plan.kept.items())]
    lines += [
        f"te{k}'s disk of {plan.kept[k].size_gib} GiB costs {money(abs(more), best.currency, HOUR)} "
        f"{'more' if more > 0 else 'less'} than the one in that price; the budget and its machine's price tag count it"
        for k, more in sorted(plan.disk_surcharge_h.items())
    ]
    return [*plan.notes, *lines]


def _stock_lines(plan: UpPlan) -> list[str]:
    """Where no offer has stock: that the price is of what cannot be had."""
    if any(quote.offer.in_stock for quote in plan.quotes):
        return []
    return [
        "none of these can be had now, says the cloud: what follows is what they would cost; all are tried, as it may "
        "be wrong"
    ]


def _parts_lines(price: Price, machines: int) -> list[str]:
    """What that hour is made of, a line each, as far as the cloud tells; and what is not in it."""
    priced = [(part, amount) for part, amount in price.parts.items() if amount]
    parts = [
        f"  {part}: {machines} x {_h(amount)} = {money(added([amount] * machines, HOUR), price.currency, HOUR)}"
        for part, amount in (priced if len(priced) > 1 else ())
    ]
    return [*parts, "  traffic out to the internet: by GB, not in the price"]


def _h(price: float) -> str:
    """A price of an hour where the column or the sum's end says what it is."""
    return bare(price, per=HOUR)


def _there(plan: UpPlan) -> str:
    count, wanted = len(plan.there), plan.wish.nodes
    sentence = f"{members.so_many(count)} {'is' if count == 1 else 'are'} there"
    return f"{sentence}, more than the {wanted} asked for, and all stay" if count > wanted else sentence


def _limit_line(plan: UpPlan, best: Price) -> str:
    wanted = plan.purchase(plan.quotes[0], plan.numbers)
    limit = cost.price_limit(plan.budget, plan.money, wanted, plan.first_price or best)
    if limit is None:
        return "spot prices cannot break it until the release: it bears even the list price"
    return (
        f"spot prices cannot break it until the release: a machine, its disks apart, is ordered at up to "
        f"{money(limit, best.currency, HOUR)}, and above that the cloud takes it back"
    )


def _offer_row(n: int, quote: Quote) -> list[str]:
    offer, machine, spot = quote.offer, quote.machine, quote.offer.spot
    what = "-"
    if machine is not None:
        gpus = f"{machine.gpus} x {machine.gpu_spec}, " if machine.gpus else ""
        what = f"{gpus}{machine.vcpus} vCPU, {machine.memory_gib:g} GiB"
    prices = " / ".join(map(_h, (spot.low, spot.middle, spot.high))) if spot else "-"
    advice = offer.advice
    rate = (advice.interruption_text or f"{advice.interruption_rate_percent:g}%") if advice else "-"
    if advice and advice.average_discount_percent:
        rate += f", {advice.average_discount_percent:g}% of list price"
    return [str(n), offer.instance_type, offer.zone_id, _h(quote.price.trade), what, prices, rate, offer.reason]


def _release_line(plan: UpPlan) -> str:
    if not plan.releases:
        return "the cloud does not release them by itself: they cost until fab down"
    return f"the cloud releases them by itself at {clock(plan.release_at)}, whatever happens here; a run extends it"


def _persistent_disk_lines(plan: UpPlan, best: Price) -> list[str]:
    month = best.parts.get(DATA_DISK, 0.0) * HOURS_A_MONTH
    costs = f"stays after that and costs {money(month, best.currency, MONTH)} until fab down --disks"
    return [f"te{k}'s data disk {costs}" for k in plan.persistent_disks if month]


def _later_lines(plan: UpPlan) -> list[str]:
    if plan.extended:
        return [_release_line(plan), _extended_line(plan), *_budget_lines(plan, cost.currency_of(plan.extended))]
    if not plan.releases:
        return [_release_line(plan)]
    first = min((i.release_at for i in plan.there if i.release_at), default=None)
    how = "a run extends it, and so does --hours"
    if plan.wish.extend:
        how = "--hours only extends; fab down ends earlier"
    return [f"the cloud releases them by itself at {clock(first)}; {how}"]


def _extended_line(plan: UpPlan) -> str:
    names = ", ".join(map(members.label, plan.extended))
    more = money(cost.later_costs(plan.extended, plan.release_at), cost.currency_of(plan.extended))
    return f"keeping {names} until then costs {more} more"


def machines_table(instances: Sequence[Instance], settings: Settings, now: datetime) -> Any:
    """The machines as they are, until when, and whether the cloud is taking one back."""
    ordered = members.members(instances)
    rows = [
        [
            name,
            "being reclaimed" if each.is_reclaimed else each.status,
            each.instance_type,
            each.zone_id,
            members.address(settings, each) or "-",
            released_at(each),
            length((each.release_at - now).total_seconds()) if each.release_at and not each.is_reclaimed else "-",
        ]
        for name, each in zip(members.names(ordered), ordered, strict=True)
    ]
    return table(["machine", "state", "type", "zone", "address", "released at", "time left"], rows, {"state"})


def down_lines(plan: DownPlan, settings: Settings) -> Iterator[str]:
    """What `fab down` deletes and what stays, a line each."""
    yield from plan.notes
    for each in plan.machines:
        yield f"delete  {members.label(each)}  {each.instance_id}  {each.instance_type}  {each.status}"
    for disk in plan.disks:
        yield f"delete  {disk_label(disk)}  {disk.disk_id}  {disk.size_gib} GiB"
    for name in plan.key_pairs:
        yield f"delete  key pair {name}, which is free"
    yield from stays_lines(plan.kept, plan.disk_months, plan.snapshots, settings, plan.currency)
    yield from _beside_snapshots(plan, settings)
    yield from plan.elsewhere
    if plan.remaining:
        yield remaining_line(plan.remaining)


def _beside_snapshots(plan: DownPlan, settings: Settings) -> Iterator[str]:
    """Of each disk that stays, whether a snapshot holds the same for less."""
    whole = [each for each in plan.snapshots if each.status == "accomplished"]
    price = cost.SnapshotPrice(settings.rental.snapshot_price_gib_month, plan.currency)
    for disk in plan.kept:
        newest = max((s for s in whole if s.disk_id == disk.disk_id), key=lambda s: s.created, default=None)
        month = plan.disk_months.get(disk.disk_id)
        if newest is None or month is None:
            continue
        if price.month([newest]) < month:
            yield (
                f"{newest.snapshot_id} holds the {disk_label(disk)} as it was at {clock(newest.created)}, for "
                f"{price.words(newest)} instead of {money(month, plan.currency, MONTH)}: fab down --disks deletes the "
                "disk, with all that was saved on it since then, and fab rebuild makes it again"
            )


def remaining_line(machines: Sequence[Instance]) -> str:
    """Machines that go on being billed, what an hour of them costs, until when."""
    ordered = members.members(machines)
    prices = [tags.price_h(each.tags) for each in ordered]
    known, currency = None not in prices, cost.currency_of(ordered)
    costs = money(added((price or 0.0 for price in prices), HOUR), currency, HOUR) if known else "price not told"
    ends = [each.release_at for each in ordered if each.release_at]
    until = f" until {clock(min(ends))}" if ends else " until fab down"
    return f"remain  {', '.join(members.names(ordered))}: {costs}{until}"


def _budget_lines(plan: UpPlan, currency: str) -> list[str]:
    """What of the month's budget is spoken for, and what is left of it; none where there is no budget."""
    if not plan.budget:
        return []
    month = [month_line(plan.money, currency)] if plan.money.committed else []
    return [*month, cost.budget_left(plan.budget, plan.money, currency)]
