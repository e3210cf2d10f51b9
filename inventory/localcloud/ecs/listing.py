"""What all lists of the API have in common: filters by tag, pages by token or by number. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from inventory.localcloud.ecs.calls import ApiError, Parameters

T = TypeVar("T")
MOST_A_PAGE = 100
USUAL_A_PAGE = 10


def page(parameters: Parameters, found: Sequence[T]) -> tuple[Sequence[T], dict[str, Any]]:
    """One page of what was found, and the fields that say which.

    By NextToken where MaxResults or NextToken is sent: the total is not valid then; else by PageNumber.
    """
    if parameters.text("MaxResults") or parameters.text("NextToken"):
        size = _size(parameters, "MaxResults")
        start = _start(parameters.text("NextToken"))
        token = _token(start + size) if start + size < len(found) else ""
        return found[start : start + size], {"TotalCount": 0, "PageNumber": 0, "PageSize": 0, "NextToken": token}
    size, number = _size(parameters, "PageSize"), max(1, parameters.number("PageNumber", 1))
    shown = found[(number - 1) * size : number * size]
    return shown, {"TotalCount": len(found), "PageNumber": number, "PageSize": size, "NextToken": ""}


def _size(parameters: Parameters, name: str) -> int:
    size = parameters.number(name, USUAL_A_PAGE)
    if not 1 <= size <= MOST_A_PAGE:
        raise ApiError(400, f"InvalidParameter.{name}", f"{name} must be between 1 and {MOST_A_PAGE}.")
    return size


def _token(start: int) -> str:
    return base64.urlsafe_b64encode(f"from {start}".encode()).decode()


def _start(token: str) -> int:
    try:
        return int(base64.urlsafe_b64decode(token).decode().removeprefix("from ")) if token else 0
    except (binascii.Error, ValueError):
        raise ApiError(400, "InvalidParameter.NextToken", "The specified NextToken is not valid.") from None


def has_tags(tags: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether all wanted tags are there; one without a value is met by any value."""
    return all(key in tags and value in ("", tags[key]) for key, value in wanted.items())


def is_named(name: str, wanted: str) -> bool:
    """Whether a name fits a filter, in which * stands for anything."""
    return not wanted or fnmatchcase(name, wanted.replace("[", "[[]"))


def emptied(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A list's answer as it is for somebody who may see nothing."""
    nothing = {"TotalCount": 0, "NextToken": ""}
    return {key: _without(value) for key, value in answer.items()} | {k: v for k, v in nothing.items() if k in answer}


def _without(value: Any) -> Any:
    return {key: [] for key in value} if isinstance(value, Mapping) else value


def without(answer: Mapping[str, Any], hidden: Collection[str]) -> dict[str, Any]:
    """A list's answer without what is named by one of these ids."""

    def shown(entries: Any) -> Any:
        return [e for e in entries if not (isinstance(e, Mapping) and any(v in hidden for v in _texts(e)))]

    def kept(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: shown(entries) if isinstance(entries, list) else entries for key, entries in value.items()}

    return {key: kept(value) for key, value in answer.items()}


def _texts(entry: Mapping[str, Any]) -> list[str]:
    return [value for value in entry.values() if isinstance(value, str)]


def ids(parameters: Parameters, name: str) -> list[str] | None:
    """A filter that is one JSON array of at most 100 ids; None where it is absent: all."""
    wanted = parameters.json_strings(name)
    if wanted is not None and len(wanted) > MOST_A_PAGE:
        raise ApiError(403, f"Invalid{name}.Malformed", f"The amount of specified {name} exceeds the limit.")
    return wanted


def tag_list(tags: Mapping[str, str]) -> dict[str, list[dict[str, str]]]:
    """Tags as answers have them."""
    return {"Tag": [{"TagKey": key, "TagValue": value} for key, value in tags.items()]}


def checked_tags(parameters: Parameters) -> dict[str, str]:
    """A request's tags. Raises ApiError for those the API refuses."""
    tags = parameters.tags()
    if len(tags) > 20:
        raise ApiError(400, "InvalidTagCount", "The specified tags are beyond the permitted range.")
    if len(tags) < len(list(parameters.groups("Tag"))):
        raise ApiError(400, "Duplicate.TagKey", "The Tag.N.Key contain duplicate key.")
    for key, value in tags.items():
        if not 1 <= len(key) <= 128 or key.startswith(("aliyun", "acs:")) or _has_scheme(key):
            raise ApiError(400, "InvalidTagKey.Malformed", "The specified Tag.n.Key is not valid.")
        if len(value) > 128 or _has_scheme(value):
            raise ApiError(400, "InvalidTagValue.Malformed", "The specified Tag.n.Value is not valid.")
    return tags


def _has_scheme(text: str) -> bool:
    return "http://" in text or "https://" in text
