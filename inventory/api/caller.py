"""One call of the API, with its repetitions, and lists that come in pages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from inventory.api.errors import ADVICE, DRY_SUCCESS, CloudError, Kind
from inventory.api.retries import Pace, repeated

ECS, VPC = "2014-05-26", "2016-04-28"
"""Versions of the two products whose actions are called."""
Found = TypeVar("Found")


class Caller:
    """What the calls of `inventory.ecs.Ecs` are built on."""

    region_id: str
    pace: Pace
    permitted: set[str]
    """Lists that this key may see, as far as that was asked."""

    def once(self, action: str, fields: Mapping[str, Any], version: str) -> dict[str, Any]:
        """One request and its answer. Raises CloudError."""
        raise NotImplementedError

    def call(
        self,
        action: str,
        fields: Mapping[str, Any],
        version: str = ECS,
        *,
        waits: bool = True,
        attempts: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """An action's answer, asked again where its error allows it; `waits`: also where a thing is not ready.

        `attempts` is called before each of them.
        """
        pace = self.pace if waits else dataclasses.replace(self.pace, wait_limit_s=0)

        def once() -> dict[str, Any]:
            if attempts:
                attempts()
            return self.once(action, fields, version)

        return repeated(once, pace)

    def pages(self, action: str, fields: Mapping[str, Any], size: int = 100) -> Iterator[dict[str, Any]]:
        """All answers of a list that is continued by NextToken."""
        token: dict[str, Any] = {}
        while True:
            answer = self.call(action, {**fields, "MaxResults": size, **token})
            yield answer
            if not answer.get("NextToken"):
                return
            token = {"NextToken": answer["NextToken"]}

    def numbered_pages(
        self, action: str, fields: Mapping[str, Any], version: str = ECS, size: int = 50
    ) -> Iterator[dict[str, Any]]:
        """All answers of a list that is continued by PageNumber and tells its TotalCount."""
        page = 1
        while True:
            answer = self.call(action, {**fields, "PageSize": size, "PageNumber": page}, version)
            yield answer
            if page * size >= int(answer.get("TotalCount") or 0):
                return
            page += 1

    def must_see(self, action: str) -> None:
        """Asked, once, where a list is empty: it also is for a key that may not see it, without any error.

        Raises CloudError (AUTH) for such a key.
        """
        if action in self.permitted:
            return
        try:
            self.call(action, {"RegionId": self.region_id, "DryRun": True})
        except CloudError as error:
            if error.kind is Kind.AUTH:
                told = f"this access key may not list what is there, so the list looks empty: allow it ecs:{action}"
                raise CloudError(f"{told} ({error.code})", Kind.AUTH, error.code, error.request_id) from error
            if error.code not in DRY_SUCCESS:
                raise
        self.permitted.add(action)

    def until(self, look: Callable[[], Found | None], what: str, limit_s: float | None = None) -> Found:
        """What `look` finds, asked every few seconds. Raises CloudError (WAIT) past the limit, saying for what."""
        limit_s = self.pace.wait_limit_s if limit_s is None else limit_s
        started = time.monotonic()
        while True:
            found = look()
            if found is not None:
                return found
            if time.monotonic() - started >= limit_s:
                raise CloudError(f"{what}: still not after {limit_s:.0f} s; {ADVICE[Kind.WAIT]}", Kind.WAIT)
            time.sleep(self.pace.poll_s)
