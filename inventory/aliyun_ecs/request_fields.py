"""Single fields of the API's requests. Pure: nested mappings and lists by the API's own names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from inventory.cloud.values import Tags

Fields = dict[str, Any]
MOST_IDS = 100


def tag_list(labels: Tags | None) -> list[Fields]:
    """Tag.N.Key and Tag.N.Value, in an order that a repeated request has too."""
    return [{"Key": key, "Value": value} for key, value in sorted((labels or {}).items())]


def filters(key: str, ids: Sequence[str] | None, labels: Tags | None, most: int = MOST_IDS) -> Iterator[Fields]:
    """The filters of a list, one request each: at most so many ids, which are one text holding a JSON array."""
    by_tag: Fields = {"Tag": tag_list(labels)} if labels else {}
    if ids is None:
        yield by_tag
        return
    for some in batches(ids, most):
        yield by_tag | {key: json.dumps(list(some))}


def batches(ids: Sequence[str], most: int = MOST_IDS) -> Iterator[Sequence[str]]:
    """Ids in groups that one call takes."""
    for start in range(0, len(ids), most):
        yield ids[start : start + most]


def stamp(at: datetime) -> str:
    """A time as the API takes it; the seconds are dropped there, so they are dropped here."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:00Z")


def lost(asked: Any, understood: Any, at: str = "") -> list[str]:
    """The names of fields that the vendor's model of a request did not take over: misspelt ones."""
    if isinstance(asked, Mapping):
        inner = understood if isinstance(understood, Mapping) else {}
        return [name for key, value in asked.items() for name in lost(value, inner.get(key), f"{at}.{key}".lstrip("."))]
    if isinstance(asked, list):
        pairs = (
            zip(asked, understood, strict=False) if isinstance(understood, list) else ((each, None) for each in asked)
        )
        return [name for one, other in pairs for name in lost(one, other, at)]
    return [] if asked == understood else [at]
