"""One call of the API, with its repetitions, and lists that come in pages."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from inventory.aliyun_ecs.errors import DRY_SUCCESS
from inventory.aliyun_ecs.fields import filters, given
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.pace import CallPace, repeated
from inventory.cloud.values import Tags

Thing = TypeVar("Thing")
Read = Callable[[Mapping[str, Any]], Iterable[Thing]]
"""What an answer tells of a list."""

ECS, VPC, STS = "2014-05-26", "2016-04-28", "2015-04-01"
"""Versions of the products whose actions are called."""
MAKING = ("Create", "Run", "Import")
"""How the actions begin that make something."""
ID = re.compile(r"(vpc|vsw|sg|i|d|s|m)-[a-z0-9]+")
WHOLE_MINUTE = timedelta(minutes=1)
"""Some lists tell times without seconds."""
SAME_TIME = timedelta(seconds=2)
PAGE, NUMBERED_PAGE = 100, 50
NOT_SERVED = "the local cloud that cluster.toml names does not run: fab local.serve"


@dataclass(frozen=True)
class Endpoint:
    """Where the API is, and whose credentials it takes."""

    host: str
    """With the port; empty: the region's own."""
    protocol: str = "https"
    credentials: Path | None = None
    """The local cloud's; None: the SDK's chain."""

    @property
    def is_loopback(self) -> bool:
        return (urlsplit(f"//{self.host}").hostname or "") in ("127.0.0.1", "localhost", "::1")


def ids_in(answer: Any) -> Iterator[str]:
    """The ids, and the key pairs' names, that are in an answer."""
    if isinstance(answer, Mapping):
        if name := answer.get("KeyPairName"):
            yield str(name)
        for value in answer.values():
            yield from ids_in(value)
    elif isinstance(answer, list | tuple):
        for value in answer:
            yield from ids_in(value)
    elif isinstance(answer, str) and ID.fullmatch(answer):
        yield answer


class Caller:
    """What the calls of `inventory.aliyun_ecs.client.Ecs` are built on."""

    region_id: str
    pace: CallPace
    permitted: set[str]
    """Lists that this key may see, as far as that was asked."""
    made: dict[str, float]
    """What this made, by its id or name, and when: other calls may not know it yet."""
    unlisted: set[str]
    """What of it was in no list since, and was not deleted."""

    ahead: timedelta
    """Of the cloud's clock to this machine's, as the last answer said."""

    def now(self) -> datetime:
        """The time by the cloud's clock, which release times are compared with; by ours until it has answered."""
        return datetime.now(UTC) + self.ahead

    @cached_property
    def account(self) -> str:
        """The number of the account that pays; empty where that is not told. Asked once, without a repetition."""
        try:
            return str(self.once("GetCallerIdentity", {}, STS).get("AccountId") or "")
        except CloudError:
            return ""

    def hear_time(self, date: str) -> None:
        """Take an answer's Date. It is in whole seconds: what is less than two is not heard."""
        with suppress(ValueError, TypeError):
            ahead = parsedate_to_datetime(date) - datetime.now(UTC)
            self.ahead = ahead if abs(ahead) >= SAME_TIME else timedelta(0)

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
        """An action's answer, asked again where its error allows it; `waits`: also where a thing is not ready, or
        was made so shortly before that the cloud does not know it yet. To a deletion that is only what was in no list.

        `attempts` is called before each of them.
        """
        pace = self.pace if waits else dataclasses.replace(self.pace, wait_limit_s=0)
        lost, removes = False, action.startswith("Delete")

        def once() -> dict[str, Any]:
            nonlocal lost
            if attempts:
                attempts()
            try:
                return self.once(action, fields, version)
            except CloudError as error:
                error.undecided, lost = lost, lost or error.kind is Kind.PASSING
                unknown = not error.undecided and any(each in str(dict(fields)) for each in self.unlisted)
                if error.kind is Kind.NOT_FOUND and self.is_new(fields) and (unknown or not removes):
                    error.kind = Kind.WAIT
                raise

        answer = repeated(once, pace)
        if action.startswith(MAKING):
            new = set(ids_in(answer))
            self.made |= dict.fromkeys(new, time.monotonic())
            self.unlisted |= new
        if removes:
            self.unlisted -= {each for each in self.unlisted if each in str(dict(fields))}
        return answer

    def remove(self, action: str, fields: Mapping[str, Any]) -> None:
        """A call that takes something away. What is gone already is no error; what was made a moment ago counts as not
        known yet, not as gone."""
        try:
            self.call(action, fields)
        except CloudError as error:
            if error.kind is not Kind.NOT_FOUND:
                raise

    def note_new(self, entries: Iterable[tuple[str, datetime]]) -> None:
        """Take from a list what was made just now, by its id and when: other calls may not know it yet."""
        recent = self.now() - timedelta(seconds=self.pace.listed_s) - WHOLE_MINUTE
        for each, created in entries:
            self.unlisted.discard(each)
            if created > recent:
                self.made.setdefault(each, time.monotonic())

    def is_new(self, fields: Mapping[str, Any]) -> bool:
        """Whether a request is about something that was made so shortly before."""
        since, request = time.monotonic() - self.pace.listed_s, str(dict(fields))
        return any(at >= since and each in request for each, at in self.made.items())

    def pages(self, action: str, fields: Mapping[str, Any], read: Read[Thing]) -> Iterator[Thing]:
        """All of a list that is continued by NextToken."""
        token: dict[str, Any] = {}
        while True:
            answer = self.call(action, {**fields, "MaxResults": PAGE, **token})
            yield from read(answer)
            if not answer.get("NextToken"):
                return
            token = {"NextToken": answer["NextToken"]}

    def numbered_pages(
        self, action: str, fields: Mapping[str, Any], read: Read[Thing], version: str = ECS
    ) -> Iterator[Thing]:
        """All of a region's list that is continued by PageNumber and tells its TotalCount."""
        page = 0
        while True:
            page += 1
            numbers = {"PageSize": NUMBERED_PAGE, "PageNumber": page}
            answer = self.call(action, {"RegionId": self.region_id, **fields, **numbers}, version)
            yield from read(answer)
            if page * NUMBERED_PAGE >= int(answer.get("TotalCount") or 0):
                return

    def owned(
        self,
        action: str,
        key: str,
        ids: Sequence[str] | None,
        tags: Tags | None,
        read: Read[Thing],
        **more: str,
    ) -> tuple[Thing, ...]:
        """A region's things with all these tags and one of these ids, for which the list has a filter called `key`;
        `more` of the list's filters count where they are not empty.

        Raises CloudError (AUTH) where there are none because this key may not see any.
        """
        fields = {"RegionId": self.region_id, **given(**more)}
        resources = tuple(
            each for some in filters(key, ids, tags) for each in self.pages(action, {**fields, **some}, read)
        )
        if not resources and ids is None:
            self.must_see(action)
        return resources

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
                message = f"this access key may not list what is there, so the list looks empty: allow it ecs:{action}"
                raise CloudError(f"{message} ({error.code})", Kind.AUTH, error.code, error.request_id) from error
            if error.code not in DRY_SUCCESS:
                raise
        self.permitted.add(action)
