"""From a call to its answer: the action looked up, the ClientToken remembered, the faults struck, the account saved.

Faults on demand say what is to go wrong, with which call. Their planning is pure; the plan is a file, so that a served
cloud can be told from outside."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from inventory.aliyun_settings import REGIONS
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs import listing
from inventory.localcloud.ecs.account import EmulatedDisk, Token, resources
from inventory.localcloud.ecs.actions import (
    ACTIONS,
    CONTROL,
    ECS,
    STS,
    VPC,
    Action,
    ApiError,
    EmulatedCloud,
    Parameters,
    no_stock,
)

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

    def remove(self, fault: Fault) -> None:
        """This one strikes no more."""
        with self._open() as file:
            _write(file, [each for each in _read(file) if each != fault])

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


# From a call to its answer: the action looked up, the ClientToken remembered, the faults struck, the account saved.

_READING = ("Describe", "List", "Get")
_OF_A_REGION = ("Instances", "Disks", "Snapshots", "KeyPairs", "SecurityGroups")
"""What was made: a region that is not the cloud's own has none."""
_ABOUT_ONE = ("DescribeSecurityGroupAttribute",)
"""Reads one thing, and refuses one that is not there; lists leave it out."""
_NAMES = {"vpc-": "VpcId", "vsw-": "VSwitchId", "sg-": "SecurityGroupId", "i-": "InstanceId", "d-": "DiskId"}
_NAMES |= {"s-": "SnapshotId"}


class NoAnswerError(Exception):
    """The caller gets no answer: its connection is cut, after `hold_s` seconds."""

    def __init__(self, hold_s: float = 0) -> None:
        super().__init__(f"cut after {hold_s:g} s")
        self.hold_s = hold_s


@dataclass
class Dispatcher:
    """The way into a cloud for calls whose signature was checked."""

    cloud: EmulatedCloud
    faults: FaultFile

    def answer(self, version: str, name: str, flat: Mapping[str, str]) -> dict[str, Any]:
        """Perform a call; the answer without its RequestId. Raises ApiError and NoAnswerError."""
        does = _found(version, name)
        if version == CONTROL:
            return self._done(does, name, Parameters(flat), None)
        fault = self._fault(name, flat)
        if fault:
            self._strike_before(fault)
            if fault.kind == "no-permission":
                return self._forbidden(does, name, Parameters(flat))
        token = flat.get("ClientToken", "")
        if len(token) > 64 or not token.isascii():
            raise ApiError(400, "InvalidParameter.ClientToken", "The specified ClientToken is not valid.")
        if token:
            answer = self._once(does, name, Parameters(flat), fault, token)
        else:
            answer = self._done(does, name, Parameters(flat), fault)
        if fault and fault.kind == "lost-answer":
            raise NoAnswerError()
        return answer

    def _once(self, does: Action, name: str, p: Parameters, fault: Fault | None, token: str) -> dict[str, Any]:
        """The deed, or its answer where this token did it before. A refused call's token is not remembered."""
        digest = digest_of(p.flat)
        with self.cloud.lock:
            known = self.cloud.account.tokens.get(f"{name} {token}")
            if known is None:
                return self._done(does, name, p, fault, digest)
            if known.digest != digest:
                status = 403 if name == "CreateSnapshot" else 400
                raise ApiError(status, "IdempotentParameterMismatch", "The specified clientToken is used.")
            return known.answer

    def _done(self, does: Action, name: str, p: Parameters, fault: Fault | None, digest: str = "") -> dict[str, Any]:
        cloud = self.cloud
        with cloud.lock:
            ids_before = set(resources(cloud.account)) if fault else set()
            self._refuse_unknown(name, p)
            region_id = p.text("RegionId") or cloud.account.region_id
            if region_id not in REGIONS:
                message = f"The specified RegionId does not exist. There are {', '.join(REGIONS)}."
                raise ApiError(404, "InvalidRegionId.NotFound", message)
            try:
                answer = does(cloud, p)
                if name.startswith(_READING) and (hidden := _lasting(cloud.account.hidden, cloud.now())):
                    answer = listing.without(answer, hidden)
                if name.removeprefix("Describe") in _OF_A_REGION and region_id != cloud.account.region_id:
                    answer = listing.emptied(answer)
                if digest:
                    cloud.account.tokens[f"{name} {p.text('ClientToken')}"] = Token(digest=digest, answer=answer)
                if fault:
                    self._strike_made(fault, ids_before)
            finally:
                if not name.startswith(_READING):
                    cloud.save()
        return answer

    def _strike_made(self, fault: Fault, before: set[str]) -> None:
        """Faults of what the call made: of what was not there before it."""
        account, until = self.cloud.account, self.cloud.now() + fault.hold_s
        made = {key: each for key, each in resources(account).items() if key not in before}
        if fault.kind == "late-list":
            account.hidden |= dict.fromkeys(made, until)
        elif fault.kind == "not-yet-known":
            account.unknown |= dict.fromkeys(made, until)
        for disk in made.values() if fault.kind == "disk-initialising" else ():
            if isinstance(disk, EmulatedDisk):
                disk.ready_at = until

    def _refuse_unknown(self, name: str, p: Parameters) -> None:
        """Raises the API's NotFound for what was made so shortly before that this call does not know it."""
        unknown = _lasting(self.cloud.account.unknown, self.cloud.now())
        if not unknown or (name.startswith(_READING) and name not in _ABOUT_ONE):
            return
        named = next((each for each in unknown if any(each in value for value in p.flat.values())), None)
        if named:
            what = next((words for begins, words in _NAMES.items() if named.startswith(begins)), "KeyPair")
            raise ApiError(404, f"Invalid{what}.NotFound", f"The specified {what} does not exist.")

    def _forbidden(self, does: Action, name: str, p: Parameters) -> dict[str, Any]:
        """What a user sees whom the account's owner lets do nothing: lists without an error, and without a content."""
        if name.startswith(_READING) and not p.flag("DryRun"):
            return listing.emptied(self._done(does, name, p, None))
        raise ApiError(403, "Forbidden.RAM", "User not authorized to operate on the specified resource.")

    def _fault(self, name: str, flat: Mapping[str, str]) -> Fault | None:
        vswitch = self.cloud.account.vswitches.get(flat.get("VSwitchId", ""))
        zone = vswitch.zone_id if vswitch else flat.get("ZoneId", "")
        return self.faults.take(name, zone, flat.get("InstanceType", ""))

    def _strike_before(self, fault: Fault) -> None:
        account = self.cloud.account
        if fault.kind == "throttle":
            message = "Request was denied due to user flow control."
            raise ApiError(400, "Throttling.User", message, {"x-acs-retry-after": "200"})
        if fault.kind == "busy":
            raise ApiError(400, fault.code, "The system is busy, or what the request names is. Please try again later.")
        if fault.kind == "error-500":
            message = "The request has failed due to a temporary failure of the server."
            raise ApiError(503, "ServiceUnavailable", message)
        if fault.kind == "no-stock":
            raise no_stock()
        if fault.kind == "time-out":
            raise NoAnswerError(fault.hold_s)
        with self.cloud.lock:
            if fault.kind == "price-moved":
                moved = account.price_factor.get(fault.instance_type, 1.0) * fault.factor
                account.price_factor[fault.instance_type] = moved
                self.cloud.save()
            elif fault.kind == "stock" and fault.instance_type not in account.stocked:
                account.stocked.append(fault.instance_type)
                self.cloud.save()


def _lasting(until: Mapping[str, float], now: float) -> set[str]:
    return {each for each, end in until.items() if now < end}


def digest_of(flat: Mapping[str, str]) -> str:
    """Of the parameters but the token."""
    serialized = json.dumps({name: value for name, value in flat.items() if name != "ClientToken"}, sort_keys=True)
    return hashlib.sha256(serialized.encode()).hexdigest()


def _found(version: str, name: str) -> Action:
    """Raises the API's InvalidVersion and InvalidAction.NotFound."""
    if version not in (ECS, VPC, STS, CONTROL):
        raise ApiError(400, "InvalidVersion", "Specified parameter Version is not valid.")
    does = ACTIONS.get((version, name))
    if does is None:
        message = f"Specified api is not found. The local cloud does not have {name}; the vendor's may."
        raise ApiError(404, "InvalidAction.NotFound", message)
    return does
