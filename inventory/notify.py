"""Messages about a run to people who do not watch it: what `[notify]` of cluster.toml asks for, each once."""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from inventory.notify_services import DELIVERY_S, NotifyAddress, NotifyError, configured_addresses, deliver
from inventory.renting.tags import StateFiles
from inventory.settings import NotifyKind, Settings

AGAIN_S = (60.0, 300.0)
"""How long after a failed try the next one may come; after the last one no more do."""
KEPT_KEYS = 300
"""How many messages of a cluster are remembered as sent."""
OF_OWNER_ALONE = partial(os.open, mode=0o600)


@dataclass(frozen=True)
class Message:
    """Something that happened, to be told once."""

    key: str
    """What makes it the same event for every command that sees it, such as RUN_ID and the time when the run ended."""
    kind: NotifyKind
    title: str
    body: str


Send = Callable[[Message], None]
"""Hands a message over; whether and when it goes out is not waited for."""
PRESENT: frozenset[NotifyKind] = frozenset({"reclaimed", "waiting", "budget"})
"""What still goes on when it is seen."""


class News:
    """Messages about something that is looked at again and again. What had happened before the first look is no news,
    but for what still goes on then."""

    def __init__(self, send: Send | None) -> None:
        """`send` of None: nobody is to be told."""
        self.send = send
        self._old: set[str] | None = None

    def take(self, messages: Sequence[Message]) -> None:
        """What a look has shown."""
        if self._old is None:
            self._old = {message.key for message in messages if message.kind not in PRESENT}
        for message in messages:
            if self.send and message.key not in self._old:
                self.send(message)


def notifier_or_none(settings: Settings, say: Callable[[str], None]) -> Notifier:
    """As `open_notifier`, for work that goes on without notifications where they are not set up well; that is said."""
    try:
        return open_notifier(settings, say)
    except NotifyError as error:
        say(f"no notifications: {error}")
        return Notifier((), (), _SentKeys(StateFiles.of(settings.name).folder), say)


def open_notifier(settings: Settings, say: Callable[[str], None]) -> Notifier:
    """The notifier of a cluster; one without addresses, where none are set up, sends nothing. `say` gets a sentence,
    once, for each way in which sending fails; another thread calls it. Raises NotifyError."""
    kinds = settings.notify.on
    addresses = configured_addresses(settings) if kinds else ()
    return Notifier(addresses, kinds, _SentKeys(StateFiles.of(settings.name).folder), say)


class Notifier:
    """Sends messages from a thread of its own, so that whoever follows a run waits for nobody."""

    def __init__(
        self,
        addresses: Sequence[NotifyAddress],
        kinds: Sequence[NotifyKind],
        sent: _SentKeys,
        say: Callable[[str], None],
    ) -> None:
        self._addresses = addresses
        self._kinds = kinds
        self._sent = sent
        self._say = say
        self._said = set[str]()
        self._queue = SimpleQueue[Message | None]()
        self._thread: threading.Thread | None = None
        self._tries = dict[str, int]()
        self._not_before = dict[str, float]()
        """By the monotonic clock, of each key; while it is being sent, and once it is sent or given up: never."""

    def send(self, message: Message) -> None:
        """Send to all addresses, if its kind is wanted and no command of this machine has sent its key for this
        cluster. Returns at once and raises nothing. A message that no address took may be sent again: those that come
        too soon are dropped."""
        if not self._addresses or message.kind not in self._kinds:
            return
        if time.monotonic() < self._not_before.get(message.key, 0.0):
            return
        self._not_before[message.key] = math.inf
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notifier", daemon=True)
            self._thread.start()
        self._queue.put(message)

    def close(self, wait_s: float = DELIVERY_S + 2) -> None:
        """Wait until what was given to `send` has been sent, but no longer than `wait_s`; the rest is dropped when the
        program ends."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(wait_s)
            self._thread = None

    def _work(self) -> None:
        while (message := self._queue.get()) is not None:
            outcomes: list[str] = []
            try:
                outcomes = self._send_once(message)
            except OSError as error:
                self._say_once(f"no notifications: {error.filename or self._sent.folder}: {error.strerror}")
            tries = self._tries[message.key] = self._tries.get(message.key, 0) + 1
            if "" not in outcomes and tries <= len(AGAIN_S):
                self._not_before[message.key] = time.monotonic() + AGAIN_S[tries - 1]

    def _send_once(self, message: Message) -> list[str]:
        """What `deliver` gives. The lock is held while it is sent: another command that saw the same event waits, and
        then knows. Raises OSError where nothing can be remembered; then nothing is sent."""
        with self._sent.locked() as keys:
            if message.key in keys:
                return [""]
            outcomes = deliver(self._addresses, message.title, message.body)
            if "" in outcomes:
                keys.append(message.key)
        for address, reason in zip(self._addresses, outcomes, strict=True):
            if reason:
                self._say_once(f"no notification to {address.scheme}: {reason}; to try it: fab notify --test")
        return outcomes

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            with suppress(OSError, ValueError):  # nobody reads it any more
                self._say(sentence)


class _SentKeys:
    """The keys of the last messages that were sent for a cluster, in a file that all commands of this machine share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def locked(self) -> Iterator[list[str]]:
        """The keys, which nobody else reads or writes meanwhile; what is appended is kept. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.folder / "notified.lock", "a", opener=OF_OWNER_ALONE) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = self._read()
            before = len(keys)
            half = self.folder / "notified.half"
            with open(half, "w", encoding="utf-8", opener=OF_OWNER_ALONE) as file:  # before anything is sent
                yield keys
                json.dump(keys[-KEPT_KEYS:], file)
            if len(keys) > before:
                half.replace(self.folder / "notified.json")

    def _read(self) -> list[str]:
        try:
            keys = json.loads((self.folder / "notified.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return []
        return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
