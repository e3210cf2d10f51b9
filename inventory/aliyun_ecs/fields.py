"""Single fields of the API's answers and requests. Pure.

The API leaves out of an answer what it does not know or writes it as "", gives some numbers as text, and spells times
with and without seconds; all of that ends here. Requests are nested mappings and lists by the API's own names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import Tags

Answer = Mapping[str, Any]
Fields = dict[str, Any]
MOST_IDS = 100


def listed(answer: Answer, *path: str) -> tuple[Any, ...]:
    """What lies at a path of keys, as Instances, Instance; () where any of it is absent or null."""
    nested: Any = answer
    for key in path:
        nested = nested.get(key) if isinstance(nested, Mapping) else None
    return tuple(nested) if isinstance(nested, list | tuple) else ()


def needed(answer: Answer, key: str) -> Any:
    """What every answer of the kind has. Raises CloudError where it is missing."""
    try:
        return answer[key]
    except (KeyError, TypeError):
        raise CloudError(f"the cloud's answer has no {key}, which every such answer should have", Kind.INPUT) from None


def moment(text: str) -> datetime:
    """An API time: 2024-02-21T03:58Z or 2024-02-21T03:58:07Z. Raises CloudError for anything else."""
    form = "%Y-%m-%dT%H:%MZ" if text.count(":") == 1 else "%Y-%m-%dT%H:%M:%SZ"
    try:
        return datetime.strptime(text, form).replace(tzinfo=UTC)
    except ValueError:
        raise CloudError(f"the cloud's answer has {text!r} for a time", Kind.INPUT) from None


def moment_or_none(text: str | None) -> datetime | None:
    """As `moment`; None for absent, empty, and for the years that stand for never (2099, 2999)."""
    at = moment(text) if text else None
    return at if at and at.year < 2099 else None


def tags(answer: Answer) -> dict[str, str]:
    """Tags of a thing: TagKey and TagValue, in older answers Key and Value."""
    pairs = listed(answer, "Tags", "Tag")
    return {each.get("TagKey") or each.get("Key", ""): each.get("TagValue") or each.get("Value", "") for each in pairs}


def first(entries: tuple[Any, ...]) -> str:
    """The first of a list; "" of an empty one."""
    return str(entries[0]) if entries else ""


def number(value: Any) -> float:
    """0 for absent and empty."""
    try:
        return float(value) if value not in (None, "") else 0.0
    except (ValueError, TypeError):
        raise CloudError(f"the cloud's answer has {value!r} for a number", Kind.INPUT) from None


def whole(value: Any) -> int:
    """0 for absent and empty."""
    return value if isinstance(value, int) else int(number(value))


def flag(value: Any) -> bool:
    """A boolean, or its name in any case."""
    return value is True or (isinstance(value, str) and value.lower() == "true")


def tag_list(labels: Tags | None) -> list[Fields]:
    """Tag.N.Key and Tag.N.Value, in an order that a repeated request has too."""
    return [{"Key": key, "Value": value} for key, value in sorted((labels or {}).items())]


def given(**fields: Any) -> Fields:
    """Those fields that are not empty."""
    return {name: value for name, value in fields.items() if value}


def filters(key: str, ids: Sequence[str] | None, labels: Tags | None, most: int = MOST_IDS) -> Iterator[Fields]:
    """The filters of a list, one request each: at most so many ids, which are one text holding a JSON array."""
    by_tag = given(Tag=tag_list(labels))
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
