"""What is told of a run to people who do not watch it: `[notify]` of cluster.toml."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from inventory.notify import Message, Send, open_notifier
from inventory.settings import load_settings
from training.laptop.run_look import RunLook, ending, headline, lost


@contextmanager
def opened_notifier(wanted: bool) -> Iterator[Send | None]:
    """What sends messages, until what was sent is out; None where nobody is to be told. Raises NotifyError,
    SettingsError."""
    if not wanted:
        yield None
        return
    with closing(open_notifier(load_settings(), print)) as notifier:
        yield notifier.send


class RunNews:
    """Of one run, as it is seen again and again. An end is news only to whoever saw it going on."""

    def __init__(self, send: Send | None) -> None:
        self._send = send
        self._was_active = False

    def take(self, seen: RunLook) -> None:
        self._was_active |= seen.active
        if self._send and self._was_active:
            for message in messages(seen):
                self._send(message)


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
        title = f"machines of {run} are taken back"
        found.append(Message(f"{run} {status.reason}", "reclaimed", title, f"{status.reason}; {where}"))
    if seen.state == "waiting":
        key = f"{run} waiting {status.changes} {status.lost_steps}"
        found.append(Message(key, "waiting", f"{run} waits for machines", f"{status.reason}; {where}"))
    return found
