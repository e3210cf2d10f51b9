"""Machines made as planned: ordered, running, with an address and their disks, answering ssh; or gone meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import paramiko

from inventory import ssh
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.port import Cloud
from inventory.cloud.values import Instance
from inventory.nodes import Node
from inventory.phases import Phases
from inventory.renting import access, disks, down, lease, ledger, members, tags
from inventory.renting.intents import Intents, settle_alone
from inventory.renting.order import Orders
from inventory.renting.plan import UpPlan, with_money
from inventory.settings import Settings

Report = Callable[[str], None]
START_S = 600.0
"""How long machines may take until they run."""
ANSWER_S = 180.0
ASK_EVERY_S = 3.0


def apply_plan(
    cloud: Cloud,
    settings: Settings,
    plan: UpPlan,
    report: Report,
    phases: Phases | None = None,
    *,
    made: list[str] | None = None,
) -> tuple[Instance, ...]:
    """Make the plan so; the machines in rank order, all running, reachable, their host keys pinned. `made`: gets the
    ids of those that are ordered, however it ends.

    May be called again after any interruption: what is there is asked of the cloud again. Raises RentError where
    another command is at work, CloudError, SshError.
    """
    intents = Intents.of(settings)
    phases, own = phases or Phases(), tags.of_cluster(settings.name)
    with intents.alone():
        for line in settle_alone(cloud, intents):
            report(line)
        orders = Orders(cloud, settings, plan, intents, report, [] if made is None else made)
        instances = cloud.instances(tags=own)
        if numbers := [k for k in members.missing(instances, plan.wish.nodes) if k in plan.numbers]:
            # another command may have spent money since the plan was made
            orders.plan = with_money(cloud, settings, plan, members.Existing(instances, cloud.disks(tags=own)))
            with phases.phase("order"):
                orders.place(numbers)
        else:
            _open_door(cloud, settings, report)
        with phases.phase("boot"):
            machines = running(cloud, settings, intents, report, orders.made)
        if twice := [each for each in members.doubles(machines) if each.instance_id in orders.made]:
            names = ", ".join(each.instance_id for each in twice)
            report(f"another fab up made the same machines elsewhere: removing {names} of this one again")
            _take_back(cloud, settings, twice, intents)
            machines = running(cloud, settings, intents, report)
        before = plan.existing.instances  # younger doubles of others are on their way out: nothing is done to them
        passing = {i.instance_id for i in members.doubles(machines)} - {i.instance_id for i in before}
        machines = tuple(each for each in machines if each.instance_id not in passing)
        if not plan.wish.partial and (wanting := members.missing(machines, plan.wish.nodes)):
            names = ", ".join(f"te{k}" for k in wanting)
            raise CloudError(f"{names} went while the others started; run the same command again", Kind.PASSING)
        book = ledger.Ledger.of(cloud, settings)
        book.record(machines, cloud.now())
        with naming_gone(cloud, machines):
            _release_later(cloud, machines, plan)
            with phases.phase("disks"):
                disks.DiskKeeper(cloud, settings, intents, report, plan.wish.snapshot).ensure(machines)
            addresses = {i.instance_id: members.address(settings, i) for i in machines}
            with phases.phase("host keys"):
                access.pin_all(cloud, settings, addresses)
            owned = cloud.disks(tags=own)
            if plan.wish.others:
                members.take_over(cloud, settings, machines, owned)
            book.record_kept(owned, None, cloud.now())
            nodes = members.as_nodes(settings, machines, owned)
            with phases.phase("ssh answers"):
                reached(nodes, lambda: access.pin_all(cloud, settings, addresses, again=True))
        listed = cloud.instances(ids=[i.instance_id for i in machines])
        refuse_gone(machines, listed)
        return members.members(listed)


def _take_back(cloud: Cloud, settings: Settings, machines: Sequence[Instance], intents: Intents) -> None:
    """Delete machines that were just made, with the disks that came with them: another command that saw them as its own
    may have set those to stay, and blank ones would wait for the next machine of that number."""
    made = {each.instance_id: each.created for each in machines}
    for disk in ledger.stays(cloud.disks(tags=tags.of_cluster(settings.name))):
        if disk.instance_id in made and disk.created >= made[disk.instance_id] - timedelta(minutes=1):
            cloud.attach_disk(disk.disk_id, disk.instance_id, True)
    down.remove(cloud, list(made), intents)


def _open_door(cloud: Cloud, settings: Settings, report: Report) -> None:
    """ssh from where this machine is now: machines that stand were opened to where it was when they were made."""
    wanted = access.network_request(settings, access.ssh_sources(settings), with_key=False)
    for note in cloud.prepare_network(wanted, Intents.of(settings)).notes:
        report(note)


def _release_later(cloud: Cloud, machines: Sequence[Instance], plan: UpPlan) -> None:
    """A look moves nothing; but no machine is left that the cloud would never release."""
    for each in machines if plan.releases else ():
        if each.release_at and not (plan.numbers or plan.wish.extend):
            continue
        target = lease.next_release(cloud.now(), each.release_at, plan.release_at, None)
        if target is not None:
            cloud.set_release_time(each.instance_id, target)
            lease.note_plan(cloud, each, target)


def running(
    cloud: Cloud, settings: Settings, intents: Intents, report: Report, made: Collection[str] = ()
) -> tuple[Instance, ...]:
    """The cluster's machines once those just made are listed and all of them run and have addresses.

    Stopped ones are started. Raises CloudError for what does not come.
    """
    until, listed_until = time.monotonic() + cloud.pace.limit_s(START_S), time.monotonic() + cloud.pace.listed_s
    unseen, started = set(made), set[str]()
    while True:
        listed = cloud.instances(tags=tags.of_cluster(settings.name))
        if unseen & (now_seen := {i.instance_id for i in listed}):
            intents.seen(sorted(now_seen))
            unseen -= now_seen
        machines = members.usable(listed)
        _start(cloud, machines, started, report)
        waiting = [i for i in machines if i.status != "Running" or not members.address(settings, i)]
        if machines and not waiting and not unseen:
            return machines
        if unseen and time.monotonic() > listed_until and not cloud.instances(ids=sorted(unseen)):
            raise CloudError(
                f"{', '.join(sorted(unseen))} were ordered and are in no list: they were taken back, or the cloud "
                "lists them late; run the same command again, it looks for them first",
                Kind.PASSING,
            )
        if time.monotonic() > until:
            names = [f"{members.label(i)} is {i.status}" for i in waiting]
            names = names or [*sorted(unseen), "no machine is listed"][:1]
            late = f"not ready after {START_S:g} s: {', '.join(names)}; `fab up` goes on, `fab down` removes"
            raise CloudError(late, Kind.WAIT)
        time.sleep(cloud.pace.poll_s)


def _start(cloud: Cloud, machines: Sequence[Instance], started: set[str], report: Report) -> None:
    """Switch stopped machines on. A new one may look stopped before it starts by itself: it is left alone."""
    for each in machines:
        if each.status != "Stopped" or each.instance_id in started:
            continue
        try:
            cloud.start([each.instance_id])
        except CloudError as error:
            if error.kind is not Kind.WAIT:
                raise
            continue
        started.add(each.instance_id)
        report(f"starting {members.label(each)}")


def reached(nodes: Sequence[Node], pin_again: Callable[[], None]) -> None:
    """Return when every node answers ssh with the host key that is pinned; where one shows another, the cloud is asked
    once more which it has (`pin_again`). Raises the SshError of one that does not answer."""
    try:
        _answering(nodes)
    except ssh.SshError as error:
        if not _is_other_key(error):
            raise
        pin_again()
        _answering(nodes)


def _answering(nodes: Sequence[Node]) -> None:
    until = time.monotonic() + ANSWER_S
    while True:
        answers = ssh.on_all(nodes, lambda node: ssh.ask(node, "true"))
        failed = {node: error for node in nodes if isinstance(error := answers[node.name], Exception)}
        if not failed:
            return
        if other := [error for error in failed.values() if _is_other_key(error)]:
            raise other[0]  # waiting does not mend it
        nodes = tuple(failed)
        if time.monotonic() > until:
            raise failed[nodes[0]]
        time.sleep(ASK_EVERY_S)


def _is_other_key(error: BaseException) -> bool:
    """paramiko's word for it lies under ours."""
    return isinstance(error.__cause__, paramiko.BadHostKeyException)


@contextmanager
def naming_gone(cloud: Cloud, machines: Sequence[Instance]) -> Iterator[None]:
    """Where what is inside fails, of the cloud, of ssh or else, and one of the machines is gone, that is the error.

    Raises CloudError naming the machines that are gone; else what was raised inside.
    """
    try:
        yield
    except RuntimeError as error:
        refuse_gone(machines, _still(cloud, machines), error)
        raise


def refuse_gone(machines: Sequence[Instance], listed: Sequence[Instance], cause: Exception | None = None) -> None:
    """Raises CloudError where one of the machines is not among those that are there. Pure."""
    ids = {each.instance_id for each in listed}
    gone = [each for each in members.members(machines) if each.instance_id not in ids]
    if gone:
        names = ", ".join(members.names(gone))
        raise CloudError(
            f"{names} went meanwhile (a spot machine is taken back at any time); run the same command again",
            Kind.PASSING,
        ) from cause


def _still(cloud: Cloud, machines: Sequence[Instance]) -> Sequence[Instance]:
    try:
        return cloud.instances(ids=[each.instance_id for each in machines])
    except CloudError:  # then the first error is the one to tell
        return machines
