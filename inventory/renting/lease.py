"""When the cloud releases machines: a run postpones it as far as the budget reaches, and idle machines go sooner."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from inventory.cloud.errors import CloudError
from inventory.cloud.opening import open_cloud
from inventory.cloud.port import Ability, Cloud
from inventory.cloud.values import Instance
from inventory.errors import InventoryError
from inventory.notify import Message, Send
from inventory.renting import cost, disks, members, tags
from inventory.renting.cost import currency_of
from inventory.renting.ledger import Ledger
from inventory.settings import Settings
from inventory.shown import clock
from training.text import deferred
from training.text.counts import MONTH, added, money

Report = Callable[[str], None]
Tell = Callable[[datetime], None]
"""Tells the head until when the machines are there: a run saves and leaves before."""
Confirm = Callable[[str], None]
"""Asks a question; returns where the answer is yes, else raises."""
EVERY_S = 300.0
AHEAD = timedelta(hours=1)
"""While a run is alive its machines have at least this long."""
EARLIEST = timedelta(minutes=35)
"""The cloud takes no release time nearer than 30 minutes and drops the seconds; the calls before may take a while."""
MARGIN = timedelta(minutes=30)
"""On top of what a run is expected to take: to look at it, fetch it and go on."""
SAME = timedelta(minutes=2)
LONGEST = timedelta(days=7)
"""What a run is expected to take, and that it goes on, is the head's word, or a mistyped number: beyond this only
`fab up --hours` goes."""


def next_release(now: datetime, current: datetime | None, wanted: datetime, latest: datetime | None) -> datetime | None:
    """The release time to set; None where the present one is right.

    Never earlier than it is but for `latest`, the end of the budget, which nothing goes beyond: machines that go
    sooner than the cloud takes another time are then left to go. Pure.
    """
    soonest = now + EARLIEST
    target = max(wanted, current or wanted)
    if latest is not None:
        target = min(target, latest)
        if latest < soonest and current is not None and current <= soonest:
            return None
    target = max(target, soonest)
    if current is not None and abs(target - current) < SAME:
        return None
    return target


def budget_end(
    cloud: Cloud, settings: Settings, machines: Sequence[Instance], now: datetime, *, watched: bool = True
) -> datetime | None:
    """Until when the budget lasts for these machines at what an hour costs now, or where nobody watches the market
    until then, can cost at most; None without a budget.
    """
    budget = settings.rental.budget
    if not budget:
        return None
    machines = cost.with_price_tags(cloud, settings, machines)
    book = Ledger.of(cloud, settings)
    past = book.record(machines, now)
    own = cloud.disks(tags=tags.of_cluster(settings.name))
    shares = cost.month_shares(own, cost.disk_months(cloud, cost.loose(own)), past, now)
    hourly_price = tags.price_h if watched else tags.most_h
    price_h = sum(max(hourly_price(i.tags) or 0.0, spot) for i, spot in _spot_now(cloud, machines))
    return cost.budget_end(budget, cost.spent(machines, past, shares, now, book.currency), price_h, now)


def _spot_now(cloud: Cloud, machines: Sequence[Instance]) -> Iterator[tuple[Instance, float]]:
    """Each machine with its zone's spot price now: prices move after the order."""
    prices, _ = cloud.spot_market(sorted({i.instance_type for i in machines if i.is_spot}), hours=3)
    for each in machines:
        kind = (each.instance_type, each.zone_id) if each.is_spot else None
        own = [p for p in prices if (p.instance_type, p.zone_id) == kind]
        yield each, max(own, key=lambda p: p.at).price if own else 0.0


def extend(
    cloud: Cloud,
    settings: Settings,
    ahead: timedelta,
    report: Report,
    *,
    watched: bool = True,
    confirm: Confirm | None = None,
) -> datetime | None:
    """Let all machines of the cluster live so long from now on, as far as the budget reaches; when the first one goes;
    None where none does.

    `watched`: this is done again and again. `confirm` is asked before they live for longer than `hours` from now on.
    """
    machines = members.usable(cloud.instances(tags=tags.of_cluster(settings.name)))
    if not machines or Ability.RELEASE_TIME not in cloud.abilities:
        return None
    now = cloud.now()
    wanted = now + ahead
    latest = budget_end(cloud, settings, machines, now, watched=watched)
    targets = [(each, next_release(now, each.release_at, wanted, latest)) for each in machines]
    extended = [(each, at) for each, at in targets if at and at > (each.release_at or at)]
    if confirm and extended and ahead > timedelta(hours=settings.rental.hours):
        confirm(_question(settings, extended))
    ends = []
    for each, target in targets:
        if target is not None:
            cloud.set_release_time(each.instance_id, target)
            note_plan(cloud, each, target)
        ends.append(target or each.release_at or wanted)
    if latest is not None and latest < wanted:
        budget = money(settings.rental.budget, currency_of(machines), MONTH)
        report(f"the budget of {budget} ends at {clock(latest)}: the machines go then")
    return min(ends)


def _question(settings: Settings, extended: Sequence[tuple[Instance, datetime]]) -> str:
    """What keeping machines that long is for, and what it costs."""
    machines, end = [each for each, _ in extended], max(at for _, at in extended)
    more = money(added(cost.later_costs([each], at) for each, at in extended), currency_of(machines))
    return (
        f"this run is expected to need the machines for longer than {settings.rental.key('hours')} = "
        f"{settings.rental.hours:g}: until {clock(end)}, which costs {more} more for "
        f"{', '.join(map(members.label, machines))}; keep them?"
    )


def note_plan(cloud: Cloud, machine: Instance, target: datetime) -> None:
    """The release time moves: what idle machines are moved back to goes with it, later, or sooner by the budget. Where
    they idle just now, a time before the planned one is none of its own."""
    planned = tags.moment_of(machine.tags, tags.PLANNED_TAG)
    cut = machine.release_at is not None and target < machine.release_at
    if planned and (planned < target or cut):
        cloud.tag("instance", [machine.instance_id], {tags.PLANNED_TAG: tags.moment(target)})


@contextmanager
def keep_machines(settings: Settings, report: Report, tell: Tell, send: Send | None = None) -> Iterator[None]:
    """Inside the `with`, rented machines are not released under a run; a cloud that does not answer is said, once.
    `send`: tells people that the budget ends."""
    if not settings.is_rented:
        yield
        return
    deferred.load()
    over = threading.Event()
    arguments = (settings, report, tell, over, send)
    thread = threading.Thread(target=_extend_until, args=arguments, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _extend_until(settings: Settings, report: Report, tell: Tell, over: threading.Event, send: Send | None) -> None:
    reported: set[str] = set()

    def once(what: str, line: str) -> None:
        if what not in reported:  # the lines differ: in times, in a request's id
            reported.add(what)
            report(line)

    def over_budget(line: str) -> None:
        once("budget", line)
        if send:
            month = f"{datetime.now(UTC):%Y-%m}"
            title = f"the budget of {settings.name} ends"
            send(Message(f"budget {settings.rental.budget} {month}", "budget", title, line))

    cloud, last = None, None
    while True:
        doing = "moved"
        try:
            cloud = cloud or open_cloud(settings)
            last = last or cloud.now() + LONGEST
            ahead = min(AHEAD, last - cloud.now())
            if ahead < AHEAD:
                once("longest", f"after {LONGEST.days} days nothing extends the machines: fab up --hours N does")
            end = extend(cloud, settings, ahead, over_budget)
            doing = "told to the head, which still has the one before"
            if end is not None:
                tell(end)
        except Exception as error:  # whatever it is: the next look may go well, and nobody else moves the time
            name = type(error).__name__
            kind = f"{error.kind} {error.code}" if isinstance(error, CloudError) else name
            once(kind, f"the machines' release time could not be {doing}: {str(error) or name}")
        if over.wait(EVERY_S):
            return


def cover(
    settings: Settings, seconds_needed: float, report: Report, tell: Tell, confirm: Confirm | None = None
) -> None:
    """Before a run starts: what it writes is kept, and the machines live for what it is expected to take and a
    little longer; the head is told until when. Raises CloudError, RentError, and what `confirm` does.

    For what a run started with --detach needs: nobody extends it afterwards. `seconds_needed` 0: nobody knows.
    `confirm` is asked where that is more than `hours` from now; without it they are the most.
    """
    if not settings.is_rented:
        return
    cloud = open_cloud(settings)
    disks.keep_head_disk(cloud, settings, cloud.instances(tags=tags.of_cluster(settings.name)), report)
    most = LONGEST if confirm else timedelta(hours=settings.rental.hours)
    known = seconds_needed if math.isfinite(seconds_needed) else 0
    needed = timedelta(seconds=min(max(0.0, known), 100 * LONGEST.total_seconds()))
    end = extend(cloud, settings, min(needed + MARGIN, most), report, watched=False, confirm=confirm)
    if end is not None:
        tell(end)
        report(_time_left(needed, end, cloud.now()))


def _time_left(needed: timedelta, end: datetime, now: datetime) -> str:
    """What a run that is about to start is told about its time."""
    if needed and end - now > needed:
        return f"the cloud releases the machines at {clock(end)}"
    known = "this run is expected to take longer" if needed else "how long this run takes is not known"
    return (
        f"{known}: it has until {clock(end)}, when the cloud releases the machines, and saves and leaves some minutes "
        "before; `fab up --hours N` gives it more"
    )


# `hours_idle`: machines that nothing uses are released sooner than planned, and as planned once something does again.
#
# A machine that is shut down is billed on, so the release time is moved: by this machine, when a run that it
# followed is over and with the next command that uses the machines. The planned time waits in a tag.


def hours_idle(settings: Settings) -> float:
    """How long machines are there that nothing uses; 0: as long as they are planned."""
    return settings.rental.hours_idle if settings.is_rented else 0


def released_at(cloud: Cloud, settings: Settings) -> datetime | None:
    """When the first machine goes; None where none does by itself."""
    return _first(_machines(cloud, settings))


def idle_text(settings: Settings) -> str:
    """How long machines idle before they go, in words: no less than the cloud takes."""
    hours, least = settings.rental.hours_idle, EARLIEST
    if timedelta(hours=hours) >= least:
        return f"{hours:g} h"
    return f"{least.total_seconds() / 60:g} min (the least that the cloud takes)"


def bring_forward(cloud: Cloud, settings: Settings) -> tuple[datetime | None, datetime | None]:
    """Nothing uses the machines: let them go `hours_idle` from now, where they would stay longer. When the first one
    would have gone, and when it does now. Raises CloudError."""
    machines, now = _machines(cloud, settings), cloud.now()
    sooner = now + max(timedelta(hours=settings.rental.hours_idle), EARLIEST)
    for each in machines:
        if each.release_at and each.release_at - sooner > SAME:
            cloud.tag("instance", [each.instance_id], {tags.PLANNED_TAG: tags.moment(each.release_at)})
            cloud.set_release_time(each.instance_id, sooner)
    return _first(machines), min(filter(None, (_first(machines), sooner)))


def move_back(cloud: Cloud, settings: Settings) -> datetime | None:
    """Something uses the machines again: they go when they were planned to, as far as the budget reaches, and at most
    `hours` from now: the plan is in a tag, and whoever may tag shall not buy. When the first one does; None where
    nothing had to be moved. Raises CloudError."""
    machines, now = _machines(cloud, settings), cloud.now()
    most = now + timedelta(hours=settings.rental.hours)
    planned = {each.instance_id: min(at, most) for each in machines if (at := _planned(each)) and at > now}
    if not planned:
        return None
    latest = budget_end(cloud, settings, machines, now)
    moved = {
        each.instance_id: target
        for each in machines
        if each.instance_id in planned
        and (target := next_release(now, each.release_at, planned[each.instance_id], latest))
    }
    for instance_id, target in moved.items():
        cloud.set_release_time(instance_id, target)
        if planned[instance_id] - target > SAME:  # as far as the budget reaches: no further later on
            cloud.tag("instance", [instance_id], {tags.PLANNED_TAG: tags.moment(target)})
    return min(moved.values(), default=None)


def restore(settings: Settings | None) -> None:
    """A command uses the machines: they stay as they were planned to. Settings of None: this machine."""
    if not (settings and hours_idle(settings)):
        return
    try:
        end = move_back(open_cloud(settings), settings)
    except InventoryError as error:
        print(f"the machines' release time could not be moved back: {error}")
        return
    if end:
        print(f"the machines stay until {clock(end)} again", flush=True)


def _planned(machine: Instance) -> datetime | None:
    """The release time it had before, where it goes sooner now."""
    at = tags.moment_of(machine.tags, tags.PLANNED_TAG)
    return at if at and machine.release_at and at > machine.release_at else None


def _machines(cloud: Cloud, settings: Settings) -> tuple[Instance, ...]:
    if Ability.RELEASE_TIME not in cloud.abilities:
        return ()
    return members.usable(cloud.instances(tags=tags.of_cluster(settings.name)))


def _first(machines: Sequence[Instance]) -> datetime | None:
    return min((each.release_at for each in machines if each.release_at), default=None)
