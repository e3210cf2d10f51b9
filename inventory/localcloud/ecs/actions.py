"""How an action of the API is written: a function of the cloud and the call's parameters, registered by name."""

from __future__ import annotations

import json
import re
import secrets
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from inventory.localcloud.ecs import account as accounts
from inventory.localcloud.ecs.account import Account, EmulatedDisk, EmulatedInstance, EmulatedSnapshot

T = TypeVar("T")


class ApiError(Exception):
    """A documented refusal: HTTP status, code, message."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})


class EmulatedMachines(Protocol):
    """The hosts and disks behind the API; `hosts.Hosts` boots real ones. All of it may be called from several
    threads; what takes long is called without the lock.
    """

    def make_disk(self, disk: EmulatedDisk, source: EmulatedSnapshot | None) -> None:
        """A blank disk, or one with the snapshot's blocks; larger ones than the snapshot end in zeros."""

    def remove_disk(self, disk: EmulatedDisk) -> None: ...

    def boot(self, instance: EmulatedInstance, disks: list[EmulatedDisk], authorized_keys: str) -> None:
        """Power on, waiting until the machine has booted."""

    def power_off(self, instance: EmulatedInstance) -> None: ...

    def release(self, instance: EmulatedInstance) -> None:
        """Power off and forget the system disk."""

    def show_disks(self, instance: EmulatedInstance, disks: list[EmulatedDisk]) -> None:
        """Attach in a running machine, so that it has these."""

    def take_snapshot(self, disk: EmulatedDisk, snapshot: EmulatedSnapshot, machine: str) -> int:
        """Copy what is on the disk as it is now; the bytes written to it. `machine`: that has it, empty for none."""

    def remove_snapshot(self, snapshot: EmulatedSnapshot) -> None: ...

    def run(self, instance: EmulatedInstance, script: str, timeout_s: float) -> tuple[int, bytes]:
        """Run a shell script in the machine as root; its exit code and output."""


@dataclass
class EmulatedCloud:
    """The emulated cloud: its account, its machines, its lock and its clock."""

    file: Path
    machines: EmulatedMachines
    subnet: str = "10.213.77.0/24"
    account: Account = field(init=False)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.account = accounts.load(self.file)

    def now(self) -> float:
        """Seconds since 1970 by the cloud's clock, which can be put forward."""
        return time.time() + self.account.clock_offset_s

    def save(self) -> None:
        accounts.save(self.file, self.account)

    def disks_of(self, instance_id: str, kind: str = "") -> list[EmulatedDisk]:
        """The disks attached to an instance, in the order they were attached."""
        disks = [d for d in self.account.disks.values() if d.instance_id == instance_id and kind in ("", d.kind)]
        return sorted(disks, key=lambda disk: (disk.kind != "system", disk.attached, disk.created))


def new_id(prefix: str) -> str:
    """An id in the cloud's form: prefix, then 20 characters."""
    letters = string.ascii_lowercase + string.digits
    return f"{prefix}bp1{''.join(secrets.choice(letters) for _ in range(17))}"


class Parameters:
    """A call's parameters, flat and by their dotted names, as they came over the wire."""

    def __init__(self, flat: Mapping[str, str]) -> None:
        self.flat = dict(flat)

    def text(self, name: str, default: str = "") -> str:
        return self.flat.get(name, default)

    def needed(self, name: str) -> str:
        """Raises the API's MissingParameter."""
        value = self.flat.get(name, "")
        if not value:
            raise ApiError(400, f"MissingParameter.{name}", f"The input parameter {name} that is mandatory is missing.")
        return value

    def read(self, name: str, how: Callable[[str], T], default: T) -> T:
        """The parameter as `how` reads it, which raises ValueError. Raises the API's InvalidParameter."""
        value = self.flat.get(name, "")
        try:
            return how(value) if value else default
        except ValueError:
            raise ApiError(400, f"InvalidParameter.{name}", f"The specified parameter {name} is not valid.") from None

    def number(self, name: str, default: int = 0) -> int:
        return self.read(name, int, default)

    def decimal(self, name: str, default: float = 0) -> float:
        return self.read(name, float, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """SDKs write True, true or TRUE."""
        value = self.flat.get(name, "")
        return value.lower() == "true" if value else default

    def strings(self, name: str) -> list[str]:
        """name.1, name.2, ... in order."""
        numbered = re.compile(rf"{re.escape(name)}\.(\d+)")
        pairs = [(int(match[1]), value) for key, value in self.flat.items() if (match := numbered.fullmatch(key))]
        return [value for _, value in sorted(pairs)]

    def json_strings(self, name: str) -> list[str] | None:
        """A parameter that is one string holding a JSON array of strings; None where it is absent."""
        return self.read(name, _strings, None)

    def groups(self, name: str) -> Iterator[Parameters]:
        """name.1.*, name.2.*, ... each as parameters of their own."""
        by_number: dict[int, dict[str, str]] = {}
        for key, value in self.flat.items():
            if match := re.fullmatch(rf"{re.escape(name)}\.(\d+)\.(.+)", key):
                by_number.setdefault(int(match[1]), {})[match[2]] = value
        for _, flat in sorted(by_number.items()):
            yield Parameters(flat)

    def below(self, name: str) -> Parameters:
        """name.*, as parameters of their own."""
        return Parameters({k.removeprefix(f"{name}."): v for k, v in self.flat.items() if k.startswith(f"{name}.")})

    def tags(self) -> dict[str, str]:
        """Tag.1.Key, Tag.1.Value, ..."""
        return {each.text("Key"): each.text("Value") for each in self.groups("Tag")}


def _strings(text: str) -> list[str] | None:
    values: Any = json.loads(text)
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ValueError(text)
    return values


def existing(records: Mapping[str, T], name: str, kind: str, status: int = 404) -> T:
    """The record of this id or name. Raises the API's Invalid….NotFound; kind: as DiskId."""
    if name not in records:
        raise ApiError(status, f"Invalid{kind}.NotFound", f"The specified {kind} does not exist.")
    return records[name]


def no_stock() -> ApiError:
    """A type that cannot be had in a zone."""
    message = (
        "The resource is out of stock in the specified zone. Please try other types, or choose other regions and zones."
    )
    return ApiError(403, "OperationDenied.NoStock", message)


def end_dry_run(p: Parameters) -> None:
    """Called by an action that has checked everything and done nothing: a dry run ends here, as an error."""
    if p.flag("DryRun"):
        raise ApiError(400, "DryRunOperation", "Request validation has been passed with DryRun flag set.")


Action = Callable[[EmulatedCloud, Parameters], dict[str, Any]]
ACTIONS: dict[tuple[str, str], Action] = {}
"""(version, action) -> what does it. Called with the cloud's lock held; the answer is without its RequestId."""
ECS, VPC, STS = "2014-05-26", "2016-04-28", "2015-04-01"
CONTROL = "local"
"""Version of the actions that are not the vendor's but drive the emulator."""


def action(name: str, version: str = ECS) -> Callable[[Action], Action]:
    """Register an action under its name in the API."""

    def register(does: Action) -> Action:
        ACTIONS[version, name] = does
        return does

    return register


MINUTE = "%Y-%m-%dT%H:%MZ"
SECOND = "%Y-%m-%dT%H:%M:%SZ"
NEVER_OF_A_MACHINE = "2099-12-31T15:59Z"
NEVER_OF_A_DISK = "2999-09-08T16:00Z"


def minute(at: float) -> str:
    """As of an instance; empty for 0."""
    return datetime.fromtimestamp(at, UTC).strftime(MINUTE) if at else ""


def second(at: float) -> str:
    """As of a disk or a snapshot; empty for 0."""
    return datetime.fromtimestamp(at, UTC).strftime(SECOND) if at else ""


def parsed(text: str) -> float:
    """Seconds since 1970 of a time in a request."""
    return datetime.strptime(text, SECOND).replace(tzinfo=UTC).timestamp()
