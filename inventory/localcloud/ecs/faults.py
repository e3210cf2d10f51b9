"""Faults on demand: what is to go wrong, with which call. The planning is pure; the plan is a file, so that a served
cloud can be told from outside."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from inventory.localcloud.commands import LocalCloudError

KINDS = {
    "throttle": "the call is refused: Throttling.User, to be tried again after 200 ms",
    "error-500": "the call is refused: ServiceUnavailable",
    "time-out": "nothing is done, the connection is held and then cut",
    "lost-answer": "the deed is done, the connection is cut without an answer",
    "no-stock": "RunInstances finds no stock, in a zone, of a type, or at all",
    "stock": "a type that is never in stock is from now on",
    "price-moved": "the spot price of a type changes from now on",
    "disk-initialising": "disks made by the call are being initialised for a while",
    "late-list": "what the call makes is in no list for a while",
    "not-yet-known": "what the call makes is listed, but a call that names it is refused for a while: NotFound",
    "busy": "the call is refused with a code that passes: SystemBusy, or the `code` of the fault",
    "no-permission": "lists are empty, and anything else, a dry run too, is refused: Forbidden.RAM",
}
EVERY_TIME = 0
"""As `times`: until it is cleared."""


@dataclass(frozen=True)
class Fault:
    """One thing to go wrong. `action` * means any; the zone and type narrow it down where they are given."""

    action: str
    kind: str
    times: int = 1
    skip: int = 0
    """Calls to let pass first."""
    zone: str = ""
    instance_type: str = ""
    hold_s: float = 30
    """Of a time-out; of a disk that is being initialised; of what is listed late or not yet known."""
    factor: float = 1.5
    """Of a moved price."""
    code: str = "SystemBusy"
    """Of a call that is refused because the cloud is busy."""

    def meets(self, action: str, zone: str, instance_type: str) -> bool:
        """Whether it is about such a call."""
        return (
            self.action in ("*", action)
            and self.zone in ("", zone)
            and (self.kind in ("stock", "price-moved") or self.instance_type in ("", instance_type))
        )


def checked(fault: Fault) -> Fault:
    """The fault. Raises LocalCloudError where there is no such kind."""
    if fault.kind not in KINDS:
        raise LocalCloudError(f"there is no fault {fault.kind!r}; there is: {', '.join(KINDS)}")
    if fault.kind in ("stock", "price-moved") and not fault.instance_type:
        raise LocalCloudError(f"{fault.kind} needs the instance type it is about")
    return fault


def struck(
    plan: Sequence[Fault], action: str, zone: str = "", instance_type: str = ""
) -> tuple[Fault | None, tuple[Fault, ...]]:
    """The fault that strikes this call, if any, and the plan that remains. One fault strikes a call; each that the
    call meets counts it as skipped until then."""
    hit: Fault | None = None
    rest: list[Fault] = []
    for fault in plan:
        if hit or not fault.meets(action, zone, instance_type):
            rest.append(fault)
        elif fault.skip > 0:
            rest.append(replace(fault, skip=fault.skip - 1))
        else:
            hit = fault
            if fault.times == EVERY_TIME:
                rest.append(fault)
            elif fault.times > 1:
                rest.append(replace(fault, times=fault.times - 1))
    return hit, tuple(rest)


@dataclass(frozen=True)
class FaultFile:
    """The plan as a file; several processes may use it."""

    path: Path

    def add(self, fault: Fault) -> None:
        """Raises LocalCloudError where there is no such kind."""
        checked(fault)
        with self._open() as file:
            _write(file, (*_read(file), fault))

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def take(self, action: str, zone: str = "", instance_type: str = "") -> Fault | None:
        """The fault that strikes this call; the plan goes on to what remains."""
        if not self.path.exists():
            return None
        with self._open() as file:
            plan = _read(file)
            hit, rest = struck(plan, action, zone, instance_type)
            if rest != plan:
                _write(file, rest)
            return hit

    @contextmanager
    def _open(self) -> Iterator[IO[str]]:
        with self.path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def _read(file: IO[str]) -> tuple[Fault, ...]:
    file.seek(0)
    text = file.read()
    return tuple(Fault(**each) for each in json.loads(text)) if text else ()


def _write(file: IO[str], plan: Sequence[Fault]) -> None:
    file.truncate(0)
    file.write(json.dumps([asdict(fault) for fault in plan], indent=1))
    file.flush()
