"""Machines on their way: listed, running, with an address, answering ssh; or gone meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import Instance
from inventory.nodes import Node
from inventory.renting import members, tags
from inventory.renting.intents import Intents

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.settings import Settings


Report = Callable[[str], None]
START_S = 600.0
"""How long machines may take until they run."""
Reach = Callable[[Sequence[Node]], None]
ANSWER_S = 180.0
ASK_EVERY_S = 3.0


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
        machines = members.counted(listed)
        _start(cloud, machines, started, report)
        waiting = [i for i in machines if i.status != "Running" or not members.address(settings, i)]
        if machines and not waiting and not unseen:
            return machines
        if unseen and time.monotonic() > listed_until and not cloud.instances(ids=sorted(unseen)):
            raise CloudError(_unlisted(unseen), Kind.PASSING)
        if time.monotonic() > until:
            names = [f"{i.name} is {i.status}" for i in waiting] or [*sorted(unseen), "no machine is listed"][:1]
            raise CloudError(_late(names), Kind.WAIT)
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
        report(f"starting {each.name}")


def _unlisted(ids: Collection[str]) -> str:
    return (
        f"{', '.join(sorted(ids))} were ordered and are in no list: they were taken back, or the cloud lists them "
        "late; run the same command again, it looks for them first"
    )


def _late(names: Sequence[str]) -> str:
    return f"not ready after {START_S:g} s: {', '.join(names)}; `fab up` goes on, `fab down` removes"


def with_new_keys(reach: Reach, pin_again: Callable[[], None]) -> Reach:
    """`reach`; where a node shows another host key than is pinned, the cloud is asked once more which it has."""
    from inventory.ssh import SshError

    def reached(nodes: Sequence[Node]) -> None:
        try:
            reach(nodes)
        except SshError as error:
            if not _is_other_key(error):
                raise
            pin_again()
            reach(nodes)

    return reached


def _is_other_key(error: BaseException) -> bool:
    """paramiko's word for it lies under ours."""
    import paramiko

    return isinstance(error.__cause__, paramiko.BadHostKeyException)


def by_ssh(nodes: Sequence[Node]) -> None:
    """Return when every node answers ssh with the host key that is pinned. Raises the SshError of one that does not."""
    from inventory import ssh

    until = time.monotonic() + ANSWER_S
    while True:
        answers = ssh.on_all(nodes, lambda node: ssh.ask(node, "true"))
        failed = [error for node in nodes if isinstance(error := answers[node.name], Exception)]
        nodes = [node for node in nodes if isinstance(answers[node.name], Exception)]
        if not nodes:
            return
        if other := [error for error in failed if _is_other_key(error)]:
            raise other[0]  # waiting does not mend it
        if time.monotonic() > until:
            raise failed[0]
        time.sleep(ASK_EVERY_S)


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


def refuse_gone(machines: Sequence[Instance], there: Sequence[Instance], cause: Exception | None = None) -> None:
    """Raises CloudError where one of the machines is not among those that are there. Pure."""
    ids = {each.instance_id for each in there}
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
