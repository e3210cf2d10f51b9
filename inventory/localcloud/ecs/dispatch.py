"""From a call to its answer: the action looked up, the ClientToken remembered, the faults struck, the account saved."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inventory.aliyun_settings import REGIONS
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
from inventory.localcloud.ecs.faults import Fault, FaultFile

_READING = ("Describe", "List", "Get")
_OF_A_REGION = ("Instances", "Disks", "Snapshots", "KeyPairs", "SecurityGroups")
"""What was made: a region that is not the cloud's own has none."""
_ABOUT_ONE = ("DescribeSecurityGroupAttribute",)
"""Reads one thing, and refuses one that is not there; lists leave it out."""
_NAMES = {"vpc-": "VpcId", "vsw-": "VSwitchId", "sg-": "SecurityGroupId", "i-": "InstanceId", "d-": "DiskId"}
_NAMES |= {"s-": "SnapshotId"}


def _refuse_other_regions(region_id: str) -> None:
    """Raises the API's InvalidRegionId.NotFound."""
    if region_id and region_id not in REGIONS:
        told = f"The specified RegionId does not exist. There are {', '.join(REGIONS)}."
        raise ApiError(404, "InvalidRegionId.NotFound", told)


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
    _running: set[str] = field(default_factory=set)
    _tokens: threading.Lock = field(default_factory=threading.Lock)

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
        key, digest = f"{name} {token}", digest_of(p.flat)
        with self._tokens:
            if key in self._running:
                told = "The previous idempotent request(s) is still processing."
                raise ApiError(403, "IdempotentProcessing", told)
            self._running.add(key)
        try:
            with self.cloud.lock:
                known = self.cloud.account.tokens.get(key)
                if known is None:
                    return self._done(does, name, p, fault, digest)
                if known.digest != digest:
                    status = 403 if name == "CreateSnapshot" else 400
                    raise ApiError(status, "IdempotentParameterMismatch", "The specified clientToken is used.")
                return known.answer
        finally:
            with self._tokens:
                self._running.discard(key)

    def _done(self, does: Action, name: str, p: Parameters, fault: Fault | None, digest: str = "") -> dict[str, Any]:
        cloud = self.cloud
        with cloud.lock:
            there = set(resources(cloud.account)) if fault else set()
            self._refuse_unknown(name, p)
            _refuse_other_regions(p.text("RegionId"))
            try:
                answer = does(cloud, p)
                if name.startswith(_READING) and (hidden := _lasting(cloud.account.hidden, cloud.now())):
                    answer = listing.without(answer, hidden)
                if name.removeprefix("Describe") in _OF_A_REGION and p.text("RegionId") not in (
                    "",
                    cloud.account.region_id,
                ):
                    answer = listing.emptied(answer)
                if digest:
                    cloud.account.tokens[f"{name} {p.text('ClientToken')}"] = Token(digest=digest, answer=answer)
                if fault:
                    self._strike_made(fault, there)
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
            told = "Request was denied due to user flow control."
            raise ApiError(400, "Throttling.User", told, {"x-acs-retry-after": "200"})
        if fault.kind == "busy":
            raise ApiError(400, fault.code, "The system is busy, or what the request names is. Please try again later.")
        if fault.kind == "error-500":
            told = "The request has failed due to a temporary failure of the server."
            raise ApiError(503, "ServiceUnavailable", told)
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
    told = json.dumps({name: value for name, value in flat.items() if name != "ClientToken"}, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _found(version: str, name: str) -> Action:
    """Raises the API's InvalidVersion and InvalidAction.NotFound."""
    if version not in (ECS, VPC, STS, CONTROL):
        raise ApiError(400, "InvalidVersion", "Specified parameter Version is not valid.")
    does = ACTIONS.get((version, name))
    if does is None:
        told = "Specified api is not found, please check your url and method."
        raise ApiError(404, "InvalidAction.NotFound", told)
    return does
