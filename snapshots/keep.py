"""Keep a run's machines: what the cloud takes back is replaced, and the run goes on with it, without a person.

Everything is asked anew at each look: of the cloud by its tags, of the head what the run does. So it may end anywhere
and begin again; what it does is what `fab rebuild` or `fab up` and the base deploy, and then `fab train --resume` do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Literal

from inventory.cloud.port import Cloud
from inventory.cloud.values import Instance
from inventory.phases import Phases
from inventory.renting import lease, members, recovery, tags
from inventory.renting.disks import when_free
from inventory.renting.machines import apply_plan
from inventory.renting.plan import RentalWish, plan_up
from inventory.renting.workload import NodeWorkload, RunState
from inventory.settings import Settings
from snapshots.listing import LATEST, YES, SnapshotError, all_snapshots, newest_first, of_data, usable
from snapshots.rebuild import Rebuilding, base_deploy, planned
from snapshots.steps import DEPLOYED_TAG
from training.text.counts import HOUR, money

LOOK_S = 15.0
AGAIN_S, AGAIN_MOST_S = 60.0, 900.0
"""After something that failed, such as an order without stock: twice as long each time."""
ASKED_S = 180.0
"""So long a run may take to go on with machines, until it is asked again."""


@dataclass(frozen=True)
class Observed:
    """A run and its machines at a moment."""

    run: RunState
    wanted: frozenset[str]
    """Names of the machines that the cluster is to have."""
    machines: Mapping[str, str]
    """Private addresses of those that stand, by name; none that is being taken back."""
    leaving: frozenset[str] = frozenset()
    """Private addresses of those that are."""
    bare: frozenset[str] = frozenset()
    """Names of those that are stopped, or have no base deploy."""
    asked: frozenset[str] = frozenset()
    """Private addresses of those that the run was asked to go on with just now."""


@dataclass(frozen=True)
class NextAction:
    """What to do next."""

    act: Literal["wait", "replace", "go on", "end"]
    why: str


def next_action(seen: Observed, orders: int) -> NextAction:
    """`orders`: how many machines may still be ordered. Pure."""
    run, missing = seen.run, sorted(seen.wanted - seen.machines.keys())
    if not (run.is_active or run.lacks_machines):
        return NextAction("end", run.reason)
    if run.is_active and run.addresses & seen.leaving:
        return NextAction("wait", "the run saves, and leaves machines that are taken back")
    if len(missing) > orders:
        why = f"missing: {', '.join(missing)}; only {orders} more may be ordered"
        return NextAction("wait" if run.is_active else "end", why)
    if missing:
        return NextAction("replace", f"to replace: {', '.join(missing)}")
    if seen.bare:
        return NextAction("replace", f"to start and deploy: {', '.join(sorted(seen.bare))}")
    if not run.is_active:
        return NextAction("go on", run.reason)
    if set(seen.machines.values()) - run.addresses - seen.asked:
        return NextAction("go on", "machines stand that the run does not use")
    return NextAction("wait", "")


def question(machines: Sequence[Instance], run: RunState, orders: int) -> str:
    """What may be ordered without asking again, and what it costs at most."""
    prices = [price for each in machines if (price := tags.most_h(each.tags)) is not None]
    currency = machines[0].tags.get(tags.CURRENCY_TAG, "") if machines else ""
    most = f", each at most about {money(max(prices), currency, HOUR)}" if prices else ""
    return (
        f"{run.run_id}: order up to {members.so_many(orders)} in place of those that are taken back{most}, and keep "
        "all of them until it is over?"
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
    look_s: float = LOOK_S
    _deployed: set[str] = field(default_factory=set)
    """Ids of machines that are known to have a base deploy, whatever their tags say."""
    _asked: frozenset[str] = frozenset()
    """Private addresses of the machines that the run was asked to go on with."""
    _asked_at: float = 0.0

    def keep(self) -> RunState:
        """The run once it is over, or needs more machines than may be ordered. What fails is said and tried again, ever
        more rarely."""
        said, pause_s = "", self.look_s
        with lease.keep_machines(self.settings, self.say, self._tell_release):
            while True:
                try:
                    decision = next_action(self._look(), self.orders)
                    if decision.why not in ("", said):
                        self.say(decision.why)
                    said, pause_s = decision.why, self.look_s
                    if decision.act == "end":
                        return self.run
                    if decision.act == "replace":
                        self._replace()
                    if decision.act == "go on":
                        self._go_on()
                except Exception as error:
                    if not (hasattr(error, "exit_code") or isinstance(error, OSError)):
                        raise
                    pause_s = min(max(AGAIN_S, 2 * pause_s), AGAIN_MOST_S)
                    self.say(f"{error}; again in {pause_s:.0f} s")
                time.sleep(pause_s)

    def _look(self) -> Observed:
        """Raises CloudError, and SnapshotError where the head does not tell what its run does."""
        instances = self._machines()
        if not self._deployed:
            self._deployed = {each.instance_id for each in instances if each.private_address in self.run.addresses}
        self.run = self._run_now(instances)
        standing = members.usable(instances)
        machines = dict(zip(members.names(standing), standing, strict=True))
        return Observed(
            self.run,
            frozenset(f"te{k}" for k in range(1, self.run.nodes + 1)),
            {name: each.private_address for name, each in machines.items()},
            leaving=frozenset(each.private_address for each in instances if each.is_reclaimed),
            bare=frozenset(name for name, each in machines.items() if each.is_stopped or not self._is_deployed(each)),
            asked=self._asked if time.monotonic() - self._asked_at < ASKED_S else frozenset(),
        )

    def _machines(self) -> tuple[Instance, ...]:
        return self.cloud.instances(tags=tags.of_cluster(self.settings.name))

    def _is_deployed(self, machine: Instance) -> bool:
        return machine.tags.get(DEPLOYED_TAG) == YES or machine.instance_id in self._deployed

    def _run_now(self, instances: Sequence[Instance]) -> RunState:
        """Without its head a run has ended."""
        heads = [each for each in members.reachable(instances) if members.number(each) == 1 and self._is_deployed(each)]
        if heads:
            state = self.workload.run_state(self.cloud, self.settings, self.run.run_id)
            if isinstance(state, RunState):
                return replace(state, nodes=max(state.nodes, self.run.nodes))
            if not heads[0].is_reclaimed:
                raise SnapshotError(state)
        return replace(self.run, is_active=False, lacks_machines=True, reason=f"{members.HEAD} is gone")

    def _replace(self) -> None:
        """Rent what is missing, start what is stopped, and deploy, as `fab up` and the base deploy do; where there is a
        snapshot, new disks are made from it and read ahead, as `fab rebuild` does."""
        before = self._machines()
        snapshot = next(filter(usable, newest_first(of_data(all_snapshots(self.cloud, self.settings)))), None)
        try:
            if snapshot is None or any(each.is_stopped for each in before):
                wish = RentalWish(self.run.nodes, self.settings.rental.hours, snapshot)
                plan = when_free(partial(plan_up, self.cloud, self.settings, wish), wait=True, cloud=self.cloud)
                apply_plan(self.cloud, self.settings, plan, self.say)
            if snapshot is None:
                self._deploy()
            else:
                self._rebuild()
        finally:
            self.orders -= len({each.instance_id for each in self._machines()} - {each.instance_id for each in before})

    def _deploy(self) -> None:
        if code := base_deploy(self.settings, Phases()):
            raise SnapshotError(f"the base deploy ended with {code}")
        self.cloud.tag("instance", [each.instance_id for each in self._machines()], {DEPLOYED_TAG: YES})

    def _rebuild(self) -> None:
        plans = partial(planned, self.cloud, self.settings, LATEST, self.run.nodes)
        plan = when_free(plans, wait=True, cloud=self.cloud)
        models = [self.workload.model_folder(name) for name in self.settings.models.names]
        Rebuilding(self.cloud, self.settings, plan, "", models, lambda: None, self.say).do_all()

    def _go_on(self) -> None:
        self._asked = frozenset(each.private_address for each in members.usable(self._machines()))
        self._asked_at = time.monotonic()
        self.workload.go_on(self.run.run_id)

    def _tell_release(self, at: datetime) -> None:
        if why := self.workload.tell_release(recovery.rented_nodes(self.cloud, self.settings)[0], at):
            raise SnapshotError(why)
