"""Keep a run's machines: what the cloud takes back is replaced, and the run goes on with it, without a person.

Everything is asked anew at each look: of the cloud by its tags, of the head what the run does. So it may end anywhere
and begin again; what it does is what `fab rebuild` or `fab up` and the base deploy, and then `fab train --resume` do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.opening import open_cloud
from inventory.cloud.port import Cloud
from inventory.cloud.values import Instance, Snapshot
from inventory.notify import Message, News, Send
from inventory.phases import Phases
from inventory.renting import keeper, lease, members, recovery, tags
from inventory.renting.disks import when_free
from inventory.renting.machines import apply_plan
from inventory.renting.members import Existing
from inventory.renting.plan import RentalWish, plan_up
from inventory.renting.workload import NodeWorkload, RunState
from inventory.settings import Settings
from snapshots.listing import LATEST, YES, SnapshotError, all_snapshots, from_tags, newest_first, of_data, usable
from snapshots.next_action import NextAction, Observed, next_action
from snapshots.rebuild import Rebuilding, base_deploy, planned
from snapshots.steps import DEPLOYED_TAG
from training.text.counts import HOUR, added, money

LOOK_S, LOOK_MOST_S, LOOK_IDLE_MOST_S = 15.0, 900.0, 60.0
"""Between two looks; after something that failed, such as an order without stock, twice as long as before, up to the
second of them, or the third while machines stand idle because the run does not go on."""
GIVE_UP_S, GIVE_UP_IDLE_S = 6 * 3600.0, 3600.0
"""So long nothing may be heard of a run that goes on, and so long all may fail while its machines idle."""
ASKED_S = 180.0
"""So long a run may take to go on with machines, until it is asked again; four times as long each time."""
SPOT_TRIES = 3
"""So often spot machines were not to be had, before others are ordered where that is allowed."""


class KeepError(SnapshotError):
    """The run cannot be kept; the message says why."""


def first_state(cloud: Cloud, settings: Settings, workload: NodeWorkload, run_id: str) -> RunState:
    """Of the run that is to be kept: this one, also where its head is gone, or the one that is going on. Raises
    CloudError, and SnapshotError where it is over."""
    standing = members.usable(cloud.instances(tags=tags.of_cluster(settings.name)))
    state = _first_look(cloud, settings, workload, run_id, standing)
    if not (state.is_active or state.lacks_machines):
        raise SnapshotError(f"{state.reason}; only a run that is going on, or that lost machines, can be kept")
    return replace(state, nodes=min(state.nodes, max(settings.rental.nodes, len(standing))))


def _first_look(
    cloud: Cloud, settings: Settings, workload: NodeWorkload, run_id: str, standing: Sequence[Instance]
) -> RunState:
    """Raises SnapshotError where a head that stands, and is none that was left half made, does not tell."""
    state = workload.run_state(cloud, settings, run_id)
    heads = [each for each in standing if members.number(each) == 1]
    is_made = any(each.tags.get(DEPLOYED_TAG) == YES for each in heads)
    if isinstance(state, RunState):
        if state.addresses or is_made:
            return state
        state = state.reason
    if not run_id or is_made:
        raise SnapshotError(state)
    return RunState(run_id, state, lacks_machines=True, nodes=settings.rental.nodes)


def question(settings: Settings, machines: Sequence[Instance], run: RunState, orders: int, *, list_price: bool) -> str:
    """What may be ordered without asking again, and what machines like those that stand cost. Raises RentError."""
    if orders < 0:
        raise RentError(f"--replacements {orders}: 0 or more is expected")
    if list_price and settings.rental.spot != "as-price-goes":
        raise RentError(f'--list-price needs {settings.rental.key("spot")} = "as-price-goes"')
    prices = [price for each in machines if (price := tags.price_h(each.tags)) is not None]
    currency = machines[0].tags.get(tags.CURRENCY_TAG, "") if machines else ""
    cost = f"; those that stand cost {money(added(prices, HOUR), currency, HOUR)} together" if prices else ""
    rate = "the day's price"
    if list_price:
        most = max((most for each in machines if (most := tags.most_h(each.tags))), default=None)
        rate += " or, where there is no spot machine, the list price"
        rate += f" ({money(most, currency, HOUR)} each)" if most else ""
    return (
        f"{run.run_id}, on up to {members.so_many(run.nodes)}: order up to {members.so_many(orders)} in place of those "
        f"that are taken back, at {rate}{cost}; keep them all until it is over?"
    )


@dataclass
class Keeper:
    """Of one run, until it is over. What belongs to other folders comes as values and functions."""

    cloud: Cloud
    settings: Settings
    workload: NodeWorkload
    run: RunState
    """As it was seen last."""
    orders: int
    """How many machines may still be ordered."""
    say: Callable[[str], None]
    send: Send
    """Tells people who do not watch."""
    is_service: bool = False
    """Nobody looked at the run before, or was asked just now: `run` has its id and number of nodes alone."""
    list_price: bool = False
    """Whether machines may be ordered that are no spot machines."""
    note_orders: Callable[[int], None] = lambda orders: None
    """Is told how many may still be ordered."""
    _deployed: set[str] = field(default_factory=set)
    """Ids of machines that are known to have a base deploy, whatever their tags say."""
    _had: set[str] = field(default_factory=set)
    """Private addresses of machines that the run had."""
    _asked: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When the run was asked last to go on with such a machine, and how often."""
    _resumed: tuple[int | None, frozenset[str], int] = (None, frozenset(), 0)
    """The newest checkpoint and the machines at the last resume, and how many followed each other with both."""
    _failed: str = ""
    """What failed last; empty where it went well."""
    _without_spot: int = 0
    """How often there was no spot machine, since one was ordered or another kind was tried."""
    _stood: frozenset[str] = frozenset()
    """Ids of the machines that stood at the last look."""
    _did_not_go_on: frozenset[str] = frozenset()
    """Ids of those with which the run could not be resumed."""
    _head_is_new: bool = False
    _has_begun: bool = False

    def __post_init__(self) -> None:
        self._news = News(self.send)

    def keep(self) -> str:
        """Why it ends: the run is over, or needs what may not be ordered. What fails is said and tried again, ever more
        rarely. Raises KeepError where that failed for too long, or somebody else keeps the machines by now."""
        with lease.keep_machines(self.settings, self.say, self._tell_release, self.send):
            why, failure = self._until_over()
        self._end(why)
        if failure:
            raise KeepError(why) from failure
        return why

    def _until_over(self) -> tuple[str, Exception | None]:
        """Why it ends, and what failed for too long."""
        said, pause_s, well_at = "", LOOK_S, time.monotonic()
        while True:
            try:
                action = next_action(self._look())
                if self.run.is_active:
                    well_at = time.monotonic()
                if action.act == "end":
                    return action.why, None
                if action.why not in ("", said):
                    self.say(action.why)
                said = action.why
                self._failed = action.act
                self._do(action)
                self._failed, pause_s, well_at = "", LOOK_S, time.monotonic()
            except KeepError:
                raise
            except Exception as error:  # nobody watches: whatever it is, the next try may go well
                kind = "" if hasattr(error, "exit_code") else f"{type(error).__name__}: "
                most_s = LOOK_MOST_S if self.run.is_active else LOOK_IDLE_MOST_S
                pause_s = LOOK_S if self._is_changed() else min(2 * pause_s, most_s)
                self.say(f"{kind}{error}; again in {pause_s:.0f} s")
                if self._failed == "go on":
                    self._did_not_go_on = self._stood
                if time.monotonic() - well_at > (GIVE_UP_S if self.run.is_active else GIVE_UP_IDLE_S):
                    return f"given up: {kind}{error}", error
            time.sleep(pause_s)

    def _end(self, why: str) -> None:
        """What the run then needs is a person's."""
        if self.run.lacks_machines or self.run.is_active:
            title = f"{self.run.run_id} is no longer kept"
            self.send(Message(f"{title} {time.time():.0f}", "waiting", title, why))
        if self.run.is_finished:
            try:
                self.workload.fetch(self.run.run_id)
            except Exception as error:  # it is on te1's disk all the same
                self.say(f"{self.run.run_id} was not fetched ({error}): fab fetch")
        self.workload.leave_idle()

    def _do(self, action: NextAction) -> None:
        if action.act == "replace":
            self._replace()
        elif action.act == "go on":
            self._go_on()

    def _look(self) -> Observed:
        """Raises CloudError, SnapshotError where the head does not tell what its run does, and KeepError."""
        instances = self._machines()
        try:
            keeper.refuse_another(instances, self.cloud.now())
        except RentError as error:
            raise KeepError(str(error)) from error
        self._stood = frozenset(each.instance_id for each in members.usable(instances))
        self._begin(instances)
        if not self._deployed:
            self._deployed = {each.instance_id for each in instances if each.private_address in self.run.addresses}
            if self._deployed:  # whoever keeps them after this one tells them from machines that were left half made
                self.cloud.tag("instance", sorted(self._deployed), {DEPLOYED_TAG: YES})
        self.run = self._run_now(instances)
        self._news.take(self.run.news)
        self._had |= self.run.addresses
        standing = members.usable(instances)
        machines = dict(zip(members.names(standing), standing, strict=True))
        addresses = {name: each.private_address for name, each in machines.items()}
        now = time.monotonic()
        recent = {each for each, (at, times) in self._asked.items() if now - at < ASKED_S * 4.0 ** (times - 1)}
        numbers = members.missing(instances, self._nodes(standing))
        return Observed(
            self.run,
            addresses,
            missing=tuple(f"te{k}" for k in numbers) if len(numbers) <= self.orders else (),
            bare=frozenset(name for name, each in machines.items() if each.is_stopped or not self._is_deployed(each)),
            new=frozenset(set(addresses.values()) - self._had - recent),
            futile=self._resumed[2] if self._resumed[:2] == (self.run.step, self._stood) else 0,
            is_short=(self._failed == "replace" or not self.run.is_active) and self._did_not_go_on != self._stood,
        )

    def _begin(self, instances: Sequence[Instance]) -> None:
        """A service may begin long after somebody was asked: what was removed since stays so."""
        if not self.is_service or self._has_begun:
            return
        if not instances:
            raise KeepError("no machine of the cluster stands any more; a service rents none anew for that")
        asked = (self.cloud, self.settings, self.workload, self.run.run_id)
        self.run = replace(_first_look(*asked, members.usable(instances)), nodes=self.run.nodes)
        self._has_begun = True

    def _machines(self) -> tuple[Instance, ...]:
        return self.cloud.instances(tags=tags.of_cluster(self.settings.name))

    def _is_changed(self) -> bool:
        """Whether other machines stand than at the last look: then it is no use to wait."""
        with suppress(CloudError):
            return self._stood != {each.instance_id for each in members.usable(self._machines())}
        return False

    def _nodes(self, standing: Sequence[Instance]) -> int:
        """How many machines the cluster may have."""
        return max(1, min(self.run.nodes, len(standing) + self.orders))

    def _is_deployed(self, machine: Instance) -> bool:
        return machine.tags.get(DEPLOYED_TAG) == YES or machine.instance_id in self._deployed

    def _run_now(self, instances: Sequence[Instance]) -> RunState:
        """Without its head a run has ended."""
        heads = [each for each in members.reachable(instances) if members.number(each) == 1]
        if heads and self._is_deployed(heads[0]) and not heads[0].is_stopped:
            state = self.workload.run_state(self.cloud, self.settings, self.run.run_id)
            if isinstance(state, RunState):
                self._head_is_new &= not state.is_active
                lost = state.lacks_machines or (self._head_is_new and not (state.is_finished or state.is_active))
                return replace(state, nodes=self.run.nodes, lacks_machines=lost and bool(state.addresses))
            if not heads[0].is_reclaimed:
                raise SnapshotError(state)
        return replace(self.run, is_active=False, lacks_machines=True, reason=f"{members.HEAD} is gone")

    def _replace(self) -> None:
        """Rent what is missing, as much of it as there is, start what is stopped, and deploy, as `fab up --partial` and
        the base deploy do; where there is a snapshot, new disks are made from it and read ahead, as `fab rebuild` does.
        """
        there = members.existing(self.cloud, self.settings)
        standing = members.usable(there.instances)
        head_is_gone = 1 not in map(members.number, standing)
        is_bare = any(each.is_stopped or not self._is_deployed(each) for each in standing)
        # te1 first, without which the others are of no use; then what stands, which an earlier try may have been cut
        # off from before disks and host keys were seen to, and which has not to wait for what is not to be had
        nodes = 1 if head_is_gone else len(standing) if is_bare else self._nodes(standing)
        snapshot = self._snapshot(there, head_is_gone=head_is_gone)
        self._order(RentalWish(nodes, self.settings.rental.hours, snapshot, partial=True))
        self._head_is_new |= head_is_gone
        if snapshot is None:
            self._deploy()
        else:
            self._rebuild()

    def _snapshot(self, there: Existing, *, head_is_gone: bool) -> Snapshot | None:
        """What new disks are made from; a lost head gets its kept disk back, and no older state in place of it. Raises
        KeepError where the run is on neither."""
        newest = next(filter(usable, newest_first(of_data(all_snapshots(self.cloud, self.settings)))), None)
        if not head_is_gone:
            return newest
        own = [disk for disk in there.disks if disk.kind == "data" and members.disk_number(disk) == 1]
        if any(not (disk.instance_id and disk.delete_with_instance) for disk in own):
            return None
        if newest is None or from_tags(newest.tags).run != self.run.run_id:
            raise KeepError(f"{members.HEAD} is gone with its disk, and the newest snapshot has not {self.run.run_id}")
        return newest

    def _order(self, wish: RentalWish) -> None:
        """See to it and to what stands. Raises CloudError, RentError; SnapshotError for more than may be ordered."""
        by_the_hour = self.list_price and self._without_spot >= SPOT_TRIES
        settings = _by_the_hour(self.settings) if by_the_hour else self.settings
        made: list[str] = []
        try:
            plan = when_free(partial(plan_up, self.cloud, settings, wish), wait=True, cloud=self.cloud)
            wanted = len(plan.numbers)
            if wanted > self.orders:  # more went while it was waited for a disk
                raise SnapshotError(f"missing by now: {wanted}; may be ordered: {self.orders}")
            self._may_order(self.orders - wanted)  # before: who is killed meanwhile may have ordered them
            try:
                apply_plan(self.cloud, settings, plan, self.say, made=made)
            finally:
                self._may_order(self.orders + wanted - len(made))
        except (CloudError, RentError) as error:
            is_lack = getattr(error, "kind", Kind.NO_STOCK) in (Kind.NO_STOCK, Kind.PRICE)
            self._without_spot = 0 if made or by_the_hour else self._without_spot + is_lack
            raise
        if made:
            self._without_spot = 0

    def _may_order(self, orders: int) -> None:
        self.orders = orders
        self.note_orders(orders)

    def _deploy(self) -> None:
        before = {each.instance_id for each in self._machines()}
        if code := base_deploy(self.settings, Phases()):
            raise SnapshotError(f"the base deploy ended with {code}")
        there = {each.instance_id for each in self._machines()}  # without those that went meanwhile
        self.cloud.tag("instance", sorted(before & there), {DEPLOYED_TAG: YES})

    def _rebuild(self) -> None:
        plan = planned(self.cloud, self.settings, LATEST, len(members.usable(self._machines())))
        models = [self.workload.model_folder(name) for name in self.settings.models.names]
        its = (self.cloud, self.settings, plan, "", models, lambda: None, self.say)
        rebuilding = Rebuilding(*its, ctrl_c_ends=True)
        for step in plan.steps:
            if step.kind in ("deploy", "warm"):
                rebuilding.do(step)

    def _go_on(self) -> None:
        addresses = {each.private_address for each in members.usable(self._machines())}
        self.workload.go_on(self.run.run_id)
        if self.run.is_active:
            for each in addresses - self._had:
                self._asked[each] = (time.monotonic(), self._asked.get(each, (0.0, 0))[1] + 1)
        else:
            title = f"{self.run.run_id} is resumed"
            self.send(Message(f"{title} {self.run.step} {time.time():.0f}", "healed", title, self.run.reason))
            *before, times = self._resumed
            self._resumed = (self.run.step, self._stood, times + 1 if before == [self.run.step, self._stood] else 1)

    def _tell_release(self, at: datetime) -> None:
        """From a thread of its own."""
        cloud = open_cloud(self.settings)
        if why := self.workload.tell_release(recovery.rented_nodes(cloud, self.settings)[0], at):
            raise SnapshotError(why)


def _by_the_hour(settings: Settings) -> Settings:
    """With machines that are no spot machines."""
    rental = settings.rental.model_copy(update={"spot": "off"})
    return settings.model_copy(update={settings.provider: rental})
