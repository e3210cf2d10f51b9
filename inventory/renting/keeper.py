"""Who keeps a cluster's machines: `fab keep` rents anew what anybody else deletes, so it is known to all who might.

On its own machine by a lock, which is free as soon as the process is gone; to other machines by a tag that is renewed.
"""

from __future__ import annotations

import platform
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta

from inventory.cloud.errors import RentError
from inventory.cloud.opening import open_cloud
from inventory.cloud.values import Instance
from inventory.renting import intents, tags
from inventory.settings import Settings
from inventory.shown import clock
from inventory.state import state_folder
from training.text import deferred

HELD, SLACK = timedelta(minutes=10), timedelta(minutes=1)
"""After the last renewal; and what clocks may differ by."""
RENEW_S, END_S = 30.0, 10.0


def alone(cluster: str) -> AbstractContextManager[None]:
    """Keep a cluster's machines from here, or remove them: no other process of this machine does. Raises RentError
    where one does."""
    path = tags.StateFiles.of(cluster).folder / "keep.busy"
    ends = f"Ctrl-C ends it, or systemctl --user disable --now {service_name(cluster)}"
    return intents.alone(path, f"fab keep keeps the machines of this cluster; {ends}")


def service_name(cluster: str) -> str:
    """Of `fab keep --install`."""
    return f"spotune-keep-{cluster}.service"


def refuse_another(machines: Sequence[Instance], now: datetime) -> None:
    """Raises RentError where another machine keeps these, or did and was cut off just now. For who is `alone`: what a
    tag says of this machine is over."""
    for each in machines:
        holder, _, moment = each.tags.get(tags.KEPT_TAG, "").rpartition(" ")
        until = tags.moment_of({tags.KEPT_TAG: moment}, tags.KEPT_TAG)
        if until and now < until <= now + HELD + SLACK and holder != _me():
            raise RentError(
                f"fab keep on {holder.partition('/')[0]} keeps the machines of this cluster, until {clock(until)} at "
                "least; end it there"
            )


@contextmanager
def named(settings: Settings, report: Callable[[str], None]) -> Iterator[None]:
    """Inside, other machines see that this one keeps the cluster's."""
    deferred.load()
    over = threading.Event()
    thread = threading.Thread(target=_renew, args=(settings, report, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_S)


def _renew(settings: Settings, report: Callable[[str], None], over: threading.Event) -> None:
    """Until it is over; then no longer. Whoever has taken over meanwhile, as this machine slept, keeps it."""
    said = ""
    while True:
        try:
            cloud = open_cloud(settings)
            if machines := cloud.instances(tags=tags.of_cluster(settings.name)):
                refuse_another(machines, cloud.now())
                until = cloud.now() + (timedelta() if over.is_set() else HELD)
                ids = [each.instance_id for each in machines]
                cloud.tag("instance", ids, {tags.KEPT_TAG: f"{_me()} {tags.moment(until)}"})
        except Exception as error:  # the next time may go well
            if said != (said := type(error).__name__):
                report(f"other machines cannot see that this one keeps the cluster: {error}")
        if over.is_set():
            return
        over.wait(RENEW_S)


def _me() -> str:
    """This machine's user, by its name and an id that was made here once."""
    file = state_folder() / "this-machine"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError), file.open("x", encoding="utf-8") as fresh:
        fresh.write(uuid.uuid4().hex)
    return f"{platform.node()[:60] or 'another machine'}/{file.read_text(encoding='utf-8')[:32]}"
