"""What all lists of the API have in common: filters by tag, pages by token or number; the actions about tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from inventory.localcloud.ecs.account import EmulatedRecord, Resource
from inventory.localcloud.ecs.actions import (
    ECS,
    Action,
    ApiError,
    EmulatedCloud,
    Parameters,
    action,
    end_dry_run,
    existing,
)

T = TypeVar("T")
AResource = TypeVar("AResource", bound=Resource)
MOST_TAGS = 20
MOST_A_PAGE = 100
USUAL_A_PAGE = 10


def describes(
    plural: str,
    one: str,
    shown: Callable[[EmulatedCloud, Any], dict[str, Any]],
    *,
    version: str = ECS,
    equal: Mapping[str, str] | None = None,
    newest: bool = False,
    has_token: bool = True,
) -> Action:
    """Register the action that lists what all filters fit, as Disks, each a Disk as `shown`, the newest first if so
    asked; `equal` as of `matching`. Without `has_token` no answer says what page follows."""

    def does(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
        end_dry_run(p)
        matches = matching(p, getattr(cloud.account, _field(plural)), f"{one}Ids", equal)
        some, paging = page(p, sorted(matches, key=lambda each: -each.created) if newest else matches)
        answer = {plural: {one: [shown(cloud, each) for each in some]}, **paging}
        return answer if has_token else {key: value for key, value in answer.items() if key != "NextToken"}

    return action(f"Describe{plural}", version)(does)


def fields_of(record: EmulatedRecord, *names: str) -> dict[str, Any]:
    """Fields of a record under the API's names: VSwitchId is its vswitch_id."""
    return {name: getattr(record, _field(name)) for name in names}


def _field(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def page(parameters: Parameters, entries: Sequence[T]) -> tuple[Sequence[T], dict[str, Any]]:
    """One page of what was found, and the fields that say which.

    By NextToken where MaxResults or NextToken is sent: the total is not valid then; else by PageNumber.
    """
    if parameters.text("MaxResults") or parameters.text("NextToken"):
        size = _size(parameters, "MaxResults")
        start = max(0, parameters.number("NextToken"))
        token = str(start + size) if start + size < len(entries) else ""
        return entries[start : start + size], {"TotalCount": 0, "PageNumber": 0, "PageSize": 0, "NextToken": token}
    size, number = _size(parameters, "PageSize"), max(1, parameters.number("PageNumber", 1))
    shown = entries[(number - 1) * size : number * size]
    return shown, {"TotalCount": len(entries), "PageNumber": number, "PageSize": size, "NextToken": ""}


def _size(parameters: Parameters, name: str) -> int:
    size = parameters.number(name, USUAL_A_PAGE)
    if not 1 <= size <= MOST_A_PAGE:
        raise ApiError(400, f"InvalidParameter.{name}", f"{name} must be between 1 and {MOST_A_PAGE}.")
    return size


def has_tags(tags: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether all wanted tags are there; one without a value is met by any value."""
    return all(key in tags and value in ("", tags[key]) for key, value in wanted.items())


def emptied(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A list's answer as it is for somebody who may see nothing."""
    nothing = {"TotalCount": 0, "NextToken": ""}
    lists: dict[str, Any] = {
        key: {name: [] for name in value} for key, value in answer.items() if isinstance(value, Mapping)
    }
    return {**answer, **lists, **{key: value for key, value in nothing.items() if key in answer}}


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


def matching(
    p: Parameters, things: Mapping[str, AResource], ids: str = "", equal: Mapping[str, str] | None = None
) -> list[AResource]:
    """What all filters fit: the tags, the parameter `ids` (one JSON array of at most 100) and those of `equal`, by
    the field each is compared with."""
    wanted, tags = p.json_strings(ids), p.tags()
    if wanted is not None and len(wanted) > MOST_A_PAGE:
        raise ApiError(403, f"Invalid{ids}.Malformed", f"The amount of specified {ids} exceeds the limit.")
    fields = {field: p.text(name) for name, field in (equal or {}).items() if p.text(name)}
    return [
        each
        for key, each in things.items()
        if (wanted is None or key in wanted)
        and has_tags(each.tags, tags)
        and all(getattr(each, field) == value for field, value in fields.items())
    ]


def tag_list(tags: Mapping[str, str]) -> dict[str, list[dict[str, str]]]:
    """Tags as answers have them."""
    return {"Tag": [{"TagKey": key, "TagValue": value} for key, value in tags.items()]}


def checked_tags(parameters: Parameters) -> dict[str, str]:
    """A request's tags. Raises ApiError for those the API refuses."""
    tags = parameters.tags()
    if len(tags) > MOST_TAGS:
        raise ApiError(400, "InvalidTagCount", "The specified tags are beyond the permitted range.")
    if any(len(value) > 128 or "http://" in value or "https://" in value for value in tags.values()):
        raise ApiError(400, "InvalidTagValue.Malformed", "The specified Tag.n.Value is not valid.")
    return tags


MOST_RESOURCES = 50


@action("TagResources")
def tag_resources(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """All of them or none."""
    account = cloud.account
    kinds: dict[str, Mapping[str, Resource]] = {
        "instance": account.instances,
        "disk": account.disks,
        "snapshot": account.snapshots,
    }
    by_id = existing(kinds, p.needed("ResourceType").lower(), "ResourceType", 400)
    if not 1 <= len(p.strings("ResourceId")) <= MOST_RESOURCES:
        raise ApiError(400, "InvalidParameter.ResourceId", f"From 1 to {MOST_RESOURCES} ResourceId are allowed.")
    resources = [existing(by_id, each, "ResourceId") for each in p.strings("ResourceId")]
    tags = checked_tags(p)
    if not tags:
        raise ApiError(400, "MissingParameter.Tag", "The input parameter Tag that is mandatory is missing.")
    if any(len({*each.tags, *tags}) > MOST_TAGS for each in resources):
        raise ApiError(400, "InvalidTagCount", "The specified tags are beyond the permitted range.")
    for each in resources:
        each.tags = {**each.tags, **tags}
    return {}
