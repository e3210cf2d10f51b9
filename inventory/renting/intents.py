"""What was about to be bought or removed: a token is on the disk before the call that uses it.

A crash between call and answer leaves the intent behind; the same request then goes out with the same token, and
the cloud answers with what it did the first time instead of doing it again. What was answered stays here too, until
the cloud's lists show it: they lag behind. The next command first settles what was cut off: did the cloud hear the
order nobody saw the answer of? Its tags say so, a while later.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Cloud
from inventory.renting import tags
from inventory.renting.tags import StateFiles
from inventory.settings import Settings

REMEMBERED_S = 30 * 60
"""An intent older than this is not repeated: by then the cloud's own lists show what came of it, and how long it
remembers a token is not documented."""
UNDECIDED = (Kind.PASSING, Kind.THROTTLED)


@dataclass(frozen=True)
class Intent:
    """A call that may have been made."""

    key: str
    token: str
    digest: str
    at: float
    """Of the last attempt, in seconds since 1970."""
    count: int = 1
    """How many things it makes."""
    ids: tuple[str, ...] = ()
    """What the cloud answered and has not listed yet."""


def digest(request: Any) -> str:
    """Of a request made of dataclasses, mappings, sequences and plain values; equal requests, equal digests."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(value)
    with suppress(TypeError, ValueError):
        return dict(value)
    return str(value)


@dataclass(frozen=True)
class Intents:
    """The pending intents of one cluster, in one file that only its owner can read."""

    path: Path

    @classmethod
    def of(cls, settings: Settings) -> Intents:
        """Those of the cluster of these settings."""
        return cls(StateFiles.of(settings.name).intents)

    @contextmanager
    def begun(self, key: str, request: Any, count: int = 1) -> Iterator[str]:
        """The token for a call. The intent is on the disk before the block starts, and is removed when it ends, also
        by a definite refusal. It stays where nobody knows what the cloud did: no answer, also to an attempt before the
        one that was refused, a crash, Ctrl-C; and where `answered` told what it did, until that was `seen`.
        """
        token = self._begin(key, digest(request), count)
        try:
            yield token
        except CloudError as error:
            if error.kind not in UNDECIDED and not error.undecided:
                self.forget(key)
            raise
        if not (intent := self.pending().get(key)) or not intent.ids:
            self.forget(key)

    def attempts(self, key: str) -> Callable[[], None]:
        """To be called before each attempt of a call that is repeated: it may be heard from then on."""
        return lambda: self._change(key, lambda intent: replace(intent, at=time.time()))

    def answered(self, key: str, ids: Sequence[str]) -> None:
        """What a call made, as the cloud said."""
        self._change(key, lambda intent: replace(intent, ids=tuple(ids)))

    def seen(self, ids: Sequence[str]) -> None:
        """These are listed, or deleted again."""
        for key, intent in self.pending().items():
            left = tuple(each for each in intent.ids if each not in ids)
            if intent.ids and not left:
                self.forget(key)
            elif left != intent.ids:
                self.answered(key, left)

    def pending(self) -> dict[str, Intent]:
        """By key, what was begun and not ended."""
        with self._edited() as pending:
            return pending

    def forget(self, key: str) -> None:
        """Remove an intent, if it is there."""
        self._change(key, lambda _: None)

    def _change(self, key: str, change: Callable[[Intent], Intent | None]) -> None:
        with self._edited() as pending:
            if key not in pending:
                return
            if changed := change(pending[key]):
                pending[key] = changed
            else:
                del pending[key]
            self._write(pending)

    def alone(self) -> AbstractContextManager[None]:
        """Hold the cluster for this process. Raises RentError where another one does, without waiting for it."""
        return alone(self.path.with_suffix(".busy"), "another fab is making or removing machines of this cluster")

    def _begin(self, key: str, wanted: str, count: int) -> str:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._edited() as pending:
            known = pending.get(key)
            if not (known and known.digest == wanted and 0 <= time.time() - known.at < REMEMBERED_S):
                known = pending[key] = Intent(key, uuid.uuid4().hex, wanted, time.time(), count)
                self._write(pending)
            return known.token

    @contextmanager
    def _edited(self) -> Iterator[dict[str, Intent]]:
        """What is pending, which nobody else writes meanwhile."""
        if not self.path.parent.is_dir():
            yield {}
            return
        with open(self.path.with_suffix(".lock"), "a", opener=_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self._read()

    def _read(self) -> dict[str, Intent]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            return {k: Intent(k, **{**fields, "ids": tuple(fields.get("ids", ()))}) for k, fields in content.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError):
            raise RentError(
                f"{self.path} is damaged; look whether machines exist (fab status), then remove the file"
            ) from None

    def _write(self, pending: dict[str, Intent]) -> None:
        content = {key: {k: v for k, v in vars(i).items() if k != "key"} for key, i in pending.items()}
        half = self.path.with_suffix(".half")
        try:
            with open(half, "wb", opener=_private) as file:
                file.write(json.dumps(content, indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            half.unlink(missing_ok=True)
            raise RentError(
                f"{self.path} cannot be written ({error.strerror}): what is about to be ordered must be on the disk "
                "first; it is as it was, make room and run the same command again"
            ) from None
        half.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def alone(lock: Path, otherwise: str) -> Iterator[None]:
    """Hold a lock file for this process. Raises RentError where another one does, without waiting for it."""
    lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(lock, "a+b", opener=_private) as holder:
        if not _locked(holder):
            time.sleep(0.5)  # a child that was just forked shares the lock until it executes its program
            if not _locked(holder):
                pid = os.pread(holder.fileno(), 32, 0).decode(errors="replace").strip() or "unknown"
                raise RentError(f"{otherwise} (process {pid}); wait until it ends")
        holder.truncate(0)
        holder.write(f"{os.getpid()}\n".encode())
        holder.flush()
        yield


def _locked(file: BinaryIO) -> bool:
    """Whether this process has the lock now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


MACHINES, DISK, DELETION = "machines", "disk", "deletion"
"""What an intent's key begins with, where a thing with a price is made or removed."""


def settle(cloud: Cloud, intents: Intents) -> tuple[str, ...]:
    """Wait until every order that was begun and never ended shows up, or is old enough to never have been heard.

    Afterwards the lists of machines and disks are the whole truth, and no such intent is left. Returns a sentence
    for each order that was heard. Raises RentError where another command is just ordering.
    """
    if not _unsettled(intents):
        return ()
    with intents.alone():
        return settle_alone(cloud, intents)


def settle_alone(cloud: Cloud, intents: Intents) -> tuple[str, ...]:
    """`settle` for a command that holds the cluster already."""
    notes = []
    for key, intent in _unsettled(intents).items():
        if not key.startswith(DELETION):  # what is still listed then is deleted by a call of its own
            if is_heard(cloud, intent):
                notes.append(f"an order that was cut off ({key}) did reach the cloud; what it made is counted")
            elif intent.ids:
                notes.append(f"{', '.join(intent.ids)} ({key}) were ordered and are in no list: they are not counted")
        intents.forget(key)
    return tuple(notes)


def _unsettled(intents: Intents) -> dict[str, Intent]:
    kinds = (MACHINES, DISK, DELETION)
    return {key: intent for key, intent in intents.pending().items() if key.split()[0] in kinds}


def is_heard(cloud: Cloud, intent: Intent) -> bool:
    """Whether what an order makes is listed; waits for all of it.

    From its last attempt on; where the cloud has answered, from now on.
    """
    look = cloud.instances if intent.key.split()[0] == MACHINES else cloud.disks
    now = time.time()
    until = (now if intent.ids else min(now, intent.at)) + cloud.pace.settle_s
    while True:
        count = len(look(tags={tags.INTENT_TAG: intent.token}))
        if count >= (len(intent.ids) or intent.count) or time.time() > until:
            return count > 0
        time.sleep(cloud.pace.poll_s)
