"""Credentials by which a machine with a role calls the API: given by its metadata service, for some hours."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from inventory.localcloud.ecs import ram_roles, times
from inventory.localcloud.ecs.actions import ApiError, Cloud
from inventory.localcloud.ecs.api import Api
from inventory.localcloud.ecs.faults import FaultFile
from inventory.localcloud.ecs.signature import Caller, Request

LASTS_S = 6 * 3600.0
RENEWED_S = LASTS_S / 2


@dataclass(frozen=True)
class RoleKey:
    instance_id: str
    key_id: str
    secret: str
    token: str
    ends: float
    """Seconds since 1970, by this machine's clock."""


@dataclass
class RoleKeys(Mapping[str, str]):
    """Key id -> secret of those that are good just now. Used by several threads."""

    _keys: dict[str, RoleKey] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def given(self, instance_id: str) -> dict[str, str]:
        """What the metadata service answers a machine: the same until it is half used up."""
        now = time.time()
        with self._lock:
            self._keys = {name: key for name, key in self._keys.items() if key.ends > now}
            fresh = [k for k in self._keys.values() if k.instance_id == instance_id and k.ends > now + RENEWED_S]
            key = fresh[-1] if fresh else self._made(instance_id, now)
        return {
            "Code": "Success",
            "AccessKeyId": key.key_id,
            "AccessKeySecret": key.secret,
            "SecurityToken": key.token,
            "LastUpdated": times.second(key.ends - LASTS_S),
            "Expiration": times.second(key.ends),
        }

    def _made(self, instance_id: str, now: float) -> RoleKey:
        words = (secrets.token_urlsafe(n) for n in (12, 24, 48))
        key = RoleKey(instance_id, f"STS.{next(words)}", next(words), next(words), now + LASTS_S)
        self._keys[key.key_id] = key
        return key

    def key(self, key_id: str) -> RoleKey | None:
        """One that is good just now."""
        with self._lock:
            found = self._keys.get(key_id)
        return found if found and found.ends > time.time() else None

    def __getitem__(self, key_id: str) -> str:
        if found := self.key(key_id):
            return found.secret
        raise KeyError(key_id)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._keys))

    def __len__(self) -> int:
        return len(self._keys)


def role_api(cloud: Cloud, keys: RoleKeys, faults: FaultFile) -> Api:
    """The API for machines with a role, and for nobody else."""

    def allow(caller: Caller, request: Request) -> None:
        key = keys.key(caller.access_key_id)
        given = {**request.query, **request.form}
        token = given.get("SecurityToken") or request.headers.get("x-acs-security-token", "")
        if key is None or not hmac.compare_digest(token.encode(), key.token.encode()):
            raise ApiError(400, "InvalidSecurityToken.Malformed", "The specified SecurityToken is malformed.")
        with cloud.lock:
            instance = cloud.account.instances.get(key.instance_id)
            may = instance is not None and caller.action in ram_roles.allowed(instance)
        if not may:
            raise ApiError(403, "Forbidden.RAM", "User not authorized to operate on the specified resource.")

    return Api(cloud, faults, keys, allow=allow)
