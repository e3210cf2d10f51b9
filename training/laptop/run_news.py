"""What is told of a run to people who do not watch it: `[notify]` of cluster.toml."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from inventory.notify import Message, News, Send, notifier_or_none, open_notifier
from inventory.settings import Settings
from training.laptop.run_look import RunLook, ending, headline, lost


@contextmanager
def opened_notifier(settings: Settings | None, *, needed: bool = True) -> Iterator[Send | None]:
    """What sends messages, until what was sent is out; None where nobody is to be told, as on this machine. Raises
    NotifyError where it is `needed`."""
    if settings is None:
        yield None
        return
    opened = open_notifier if needed else notifier_or_none
    with closing(opened(settings, print)) as notifier:
        yield notifier.send


class RunNews:
    """Of one run that is followed."""

    def __init__(self, send: Send | None) -> None:
        self._news = News(send)
        self._last: RunLook | None = None

    def take(self, seen: RunLook) -> None:
        """A run that seems dead without having ended gets a second look: it may be writing its last words."""
        if seen.state != "lost" or (self._last and self._last.state == "lost"):
            self._news.take(messages(seen))
        self._last = seen

    def lose(self, run_id: str, why: str) -> None:
        """Its head does not answer any more."""
        if self._news.send and self._last and self._last.active:
            title = f"{run_id} is no longer followed"
            self._news.send(Message(f"{title} {time.time():.0f}", "failed", title, why))


def messages(seen: RunLook) -> list[Message]:
    """What a run says of itself at a moment; the keys are the same whenever and wherever it is seen. Pure."""
    status, run = seen.status, seen.run_id
    if status is None:
        return []
    if seen.over:
        asked = seen.state == "finished" or status.cause.kind == "asked"
        key = f"{run} {seen.state} {status.ended or status.started:.0f}"
        return [Message(key, "ended" if asked else "failed", f"{run} {seen.state}", ending(run, seen))]
    found = []
    where = headline(seen.metrics[-1], None) if seen.metrics else "before its first step"
    if status.changes:
        title = f"{run} goes on with other machines"
        found.append(Message(f"{run} change {status.changes}", "healed", title, f"{lost(status)}; {where}"))
    if status.cause.kind in ("reclaimed", "released"):
        title = f"machines of {run} are {'taken back' if status.cause.kind == 'reclaimed' else 'released'}"
        found.append(Message(f"{run} {status.reason}", "reclaimed", title, f"{status.reason}; {where}"))
    if seen.state == "waiting":
        key = f"{run} waiting {status.started:.0f}"
        found.append(Message(key, "waiting", f"{run} waits for machines", f"{status.reason}; {where}"))
    return found
