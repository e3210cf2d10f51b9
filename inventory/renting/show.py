"""What renting looks like in a terminal: offers, machines and money. rich is imported where it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from inventory.cloud.values import DATA_DISK, HOURS_A_MONTH, Disk, Instance, Price, Snapshot
from inventory.renting import cost, members
from inventory.renting.down import DownPlan
from inventory.renting.ledger import Entry
from inventory.renting.offers import Quote
from inventory.renting.plan import UpPlan
from inventory.settings import Settings
from inventory.shown import clock, console, table

FREE = "free: VPC, vSwitch, security group, key pair, traffic between the machines and into them"
BILLED = (
    "billed: each machine by the second with its system disk and data disk (in the price above), "
    "traffic out to the internet by GB (not in it), kept disks and snapshots by the month"
)
SHOWN_OFFERS = 8


def show(*what: Any) -> None:
    """Print tables and lines; where no terminal is, as wide as they are."""
    terminal = console()
    if not terminal.is_terminal:
        terminal = console(width=200)
    for each in what:
        terminal.print(each, soft_wrap=isinstance(each, str))


def up_table(plan: UpPlan) -> Any:
    """What would be ordered, where, at which price, until when; for `show` or any rich console."""
    from rich.console import Group
    from rich.text import Text

    return Group(*(Text(each) if isinstance(each, str) else each for each in _up(plan)))


def _up(plan: UpPlan) -> list[Any]:
    if not plan.numbers:
        return [*plan.notes, f"{_there(plan)}; none is missing", *_later_lines(plan)]
    spot_price = "spot price 3 days (low/median/high)"
    offers = table(
        ["try", "type", "zone", "what", spot_price, "30 days: reclaimed", f"{plan.quotes[0].price.currency}/h", "note"],
        [_offer_row(n, quote) for n, quote in enumerate(plan.quotes[:SHOWN_OFFERS], start=1)],
    )
    best = plan.quotes[0].price
    hour, less = _hour(plan)
    spot = "spot machines, which the cloud may take back" if plan.is_spot else "machines by the hour"
    lines = [
        f"{_there(plan)}; to make: {', '.join(f'te{k}' for k in plan.numbers)} ({spot})",
        offers,
        f"price: {len(plan.numbers)} x {best.trade:.2f}{less} = {hour:.2f} {best.currency} an hour, "
        f"{hour * plan.wish.hours:.2f} {best.currency} for {plan.wish.hours:g} h"
        + (f" (list price {best.list * len(plan.numbers):.2f} an hour)" if best.list > best.trade else "")
        + (", and the kept disks as until now" if less else ""),
        BILLED,
        FREE,
        f"ssh is open to {', '.join(plan.ssh_from)} only",
        _release_line(plan),
        *_staying_lines(plan, best),
        *([_longer_line(plan)] if plan.longer else []),
    ]
    if plan.budget:
        lines.append(f"budget: {plan.budget - plan.money.committed:.2f} of {plan.budget:g} {best.currency} are left")
        lines += [_limit_line(plan, best)] if plan.is_spot else []
    lines += [f"te{k} gets its kept disk {disk.disk_id} again" for k, disk in sorted(plan.kept.items())]
    lines += [
        f"te{k}'s disk of {plan.kept[k].size_gib} GiB costs {more:+.4f} {best.currency} an hour beside the one in that "
        "price; the budget and its machine's price tag count it"
        for k, more in sorted(plan.more_h.items())
    ]
    return [*lines, *plan.notes]


def _there(plan: UpPlan) -> str:
    count = len(plan.there)
    return f"{members.so_many(count)} {'is' if count == 1 else 'are'} there"


def _hour(plan: UpPlan) -> tuple[float, str]:
    """What an hour of the new machines costs on top of what is paid already, and what of it is not new."""
    best = plan.quotes[0]
    names = [f"te{k}" for k, disk in sorted(plan.kept.items()) if disk.zone_id == best.offer.zone_id]
    less = len(names) * best.price.parts.get(DATA_DISK, 0.0)
    said = f" - {less:.4f} for the kept disk of {', '.join(names)}" if less else ""
    return best.price.trade * len(plan.numbers) - less, said


def _limit_line(plan: UpPlan, best: Price) -> str:
    wanted = plan.purchase(plan.quotes[0], plan.numbers)
    limit = cost.price_limit(plan.budget, plan.money, wanted, plan.first_price or best)
    if limit is None:
        return "spot prices cannot break it until the release: it bears even the list price"
    return (
        f"spot prices cannot break it until the release: a machine, its disks apart, is ordered at up to {limit:.3f} "
        f"{best.currency} an hour, and above that the cloud takes it back"
    )


def _offer_row(n: int, quote: Quote) -> list[str]:
    offer, machine, spot = quote.offer, quote.machine, quote.offer.spot
    what = "-"
    if machine is not None:
        gpus = f"{machine.gpus} x {machine.gpu_spec}, " if machine.gpus else ""
        what = f"{gpus}{machine.vcpus} vCPU, {machine.memory_gib:g} GiB"
    prices = f"{spot.low:.2f} / {spot.middle:.2f} / {spot.high:.2f}" if spot else "-"
    advice = offer.advice
    rate = (advice.interruption_text or f"{advice.interruption_rate_percent:g}%") if advice else "-"
    if advice and advice.average_discount_percent:
        rate += f", {advice.average_discount_percent:g}% of list price"
    return [str(n), offer.instance_type, offer.zone_id, what, prices, rate, f"{quote.price.trade:.2f}", offer.reason]


def _release_line(plan: UpPlan) -> str:
    if not plan.releases:
        return "the cloud does not release them by itself: they cost until fab down"
    return f"the cloud releases them by itself at {clock(plan.release_at)}, whatever happens here; a run extends it"


def _staying_lines(plan: UpPlan, best: Price) -> list[str]:
    month = best.parts.get(DATA_DISK, 0.0) * HOURS_A_MONTH
    costs = f"stays after that and costs {month:.2f} {best.currency} a month until fab down --disks"
    return [f"te{k}'s data disk {costs}" for k in plan.staying if month]


def _later_lines(plan: UpPlan) -> list[str]:
    if plan.longer:
        return [_release_line(plan), _longer_line(plan)]
    if not plan.releases:
        return [_release_line(plan)]
    first = min((i.release_at for i in plan.there if i.release_at), default=None)
    how = "a run extends it, and so does --hours"
    if plan.wish.extend:
        how = "--hours only extends; fab down ends earlier"
    return [f"the cloud releases them by itself at {clock(first)}; {how}"]


def _longer_line(plan: UpPlan) -> str:
    names = ", ".join(i.name for i in plan.longer)
    return f"keeping {names} until then costs {cost.later_costs(plan.longer, plan.release_at):.2f} more"


def left(at: datetime | None, now: datetime) -> str:
    """How long until a moment."""
    if at is None:
        return "-"
    minutes = max(0, int((at - now).total_seconds() // 60))
    return f"{minutes // 60} h {minutes % 60:02d} min"


def machines_table(instances: Sequence[Instance], settings: Settings, now: datetime) -> Any:
    """The machines as they are, until when, and whether the cloud is taking one back."""
    ordered = members.members(instances)
    rows = [
        [
            name,
            "being taken back" if each.is_reclaimed else each.status,
            each.instance_type,
            each.zone_id,
            members.address(settings, each) or "-",
            clock(each.release_at),
            left(each.release_at, now),
        ]
        for name, each in zip(members.names(ordered), ordered, strict=True)
    ]
    return table(["machine", "state", "type", "zone", "address", "released at", "time left"], rows)


def down_lines(plan: DownPlan, settings: Settings) -> Iterator[str]:
    """What `fab down` deletes and what stays, a line each."""
    yield from plan.notes
    for each in plan.machines:
        yield f"delete  {each.name}  {each.instance_id}  {each.instance_type}  {each.status}"
    for disk in plan.disks:
        yield f"delete  {_label(disk)}  {disk.disk_id}  {disk.size_gib} GiB"
    for name in plan.key_pairs:
        yield f"delete  key pair {name}, which is free"
    yield from stays_lines(plan.kept, plan.disk_months, plan.snapshots, settings)
    yield from elsewhere_lines(plan.elsewhere)


def _label(disk: Disk) -> str:
    k = members.disk_number(disk)
    return f"data disk of te{k}" if k else disk.name or "data disk"


def stays_lines(
    disks: Sequence[Disk], months: Mapping[str, float], snapshots: Sequence[Snapshot], settings: Settings
) -> Iterator[str]:
    """Disks and snapshots that go on costing, with what they cost a month."""
    for disk in disks:
        price = f"{months[disk.disk_id]:.2f} a month" if disk.disk_id in months else "price not told"
        yield f"stays   {_label(disk)}  {disk.disk_id}  {disk.size_gib} GiB, {price} (fab down --disks)"
    for each in snapshots:
        month = cost.snapshot_month(each, settings.rental.snapshot_price_gib_month)
        most = "" if each.size_bytes else "at most "
        yield f"stays   {each.name}  {each.snapshot_id}, {most}{month:.2f} a month (fab snapshots.prune)"


def elsewhere_lines(left: Sequence[Entry]) -> Iterator[str]:
    """What bills in regions and accounts that were not looked at, a line each."""
    for each in left:
        until = f" until {clock(each.release_at)} at least" if each.release_at else ""
        how = f'with region = "{each.region}" in cluster.toml' + (" and that account's key" if each.account else "")
        yield (
            f"elsewhere  {each.name or each.instance_type}  {each.instance_id}  {each.instance_type}  in "
            f"{each.where.words}: billed{until}; look, and remove it, {how}"
        )


def cost_table(instances: Sequence[Instance], now: datetime) -> Any:
    """Each machine's hours and money."""
    rows = []
    for each in members.members(instances):
        paid = cost.machine_cost(each, now)
        money = ("-" if m is None else f"{m:.2f}" for m in (paid.price_h, paid.so_far, paid.until_release))
        rows.append([each.name, each.instance_type, f"{paid.hours:.1f}", *money, clock(each.release_at)])
    return table(["machine", "type", "hours", "price/h", "so far", "until release", "released at"], rows)


def past_table(past: Sequence[Entry], now: datetime) -> Any:
    """Machines of this month that are gone."""
    rows = [
        [e.name, e.instance_type, f"{hours:.1f}", f"{e.price_h:.2f}", f"{hours * e.price_h:.2f}", clock(e.ended)]
        for e in past
        if e.ended and e.ended > cost.month_start(now)
        for hours in [cost.hours_between(max(e.created, cost.month_start(now)), e.ended)]
    ]
    return table(["past machine", "type", "hours", "price/h", "cost", "until"], rows) if rows else ""
