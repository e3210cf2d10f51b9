"""Actions about tags of what there is: machines, disks, snapshots, security groups, key pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action
from inventory.localcloud.ecs.listing import checked_tags, has_tags, page
from inventory.localcloud.ecs.world import Disk, Image, Instance, KeyPair, SecurityGroup, Snapshot

MOST_TAGS, MOST_RESOURCES, A_PAGE = 20, 50, 50
_COUNTED = {
    "instance": "Instance",
    "disk": "Disk",
    "snapshot": "Snapshot",
    "image": "Image",
    "securitygroup": "Securitygroup",
    "keypair": "KeyPair",
}
Tagged = Instance | Disk | Snapshot | Image | SecurityGroup | KeyPair


@action("TagResources")
def tag_resources(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """All of them or none."""
    found, tags = _asked(cloud, p), checked_tags(p)
    if not tags:
        raise ApiError(400, "MissingParameter.Tag", "The input parameter Tag that is mandatory is missing.")
    if any(len({*each.tags, *tags}) > MOST_TAGS for each in found):
        raise ApiError(400, "InvalidTagCount", "The specified tags are beyond the permitted range.")
    for each in found:
        each.tags = {**each.tags, **tags}
    return {}


@action("UntagResources")
def untag_resources(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    found, keys = _asked(cloud, p), p.strings("TagKey")
    for each in found:
        each.tags = {} if p.flag("All") and not keys else {k: v for k, v in each.tags.items() if k not in keys}
    return {}


@action("ListTagResources")
def list_tag_resources(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Every tag of the resources that are asked for by id or by tag, one row each."""
    kind, wanted, tags = p.needed("ResourceType").lower(), p.strings("ResourceId"), p.tags()
    if not wanted and not tags:
        told = "Either ResourceId.N or Tag.N must be specified."
        raise ApiError(400, "MissingParameter.TagOrResourceId", told)
    rows = [
        {"ResourceId": name, "ResourceType": kind, "TagKey": key, "TagValue": value}
        for name, each in _all(cloud, kind).items()
        if (not wanted or name in wanted) and has_tags(each.tags, tags)
        for key, value in each.tags.items()
    ]
    shown, told_page = page(Parameters({**p.flat, "MaxResults": str(A_PAGE)}), rows)
    return {"TagResources": {"TagResource": list(shown)}, "NextToken": told_page["NextToken"]}


@action("DescribeTags")
def describe_tags(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Every tag there is, and how many resources of which kind have it."""
    kinds = [p.text("ResourceType").lower()] if p.text("ResourceType") else list(_COUNTED)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for kind in kinds:
        for name, each in _all(cloud, kind).items():
            if p.text("ResourceId") in ("", name):
                for tag in each.tags.items():
                    counts.setdefault(tag, Counter())[_COUNTED[kind]] += 1
    rows = [
        {"TagKey": key, "TagValue": value, "ResourceTypeCount": dict(count)}
        for (key, value), count in counts.items()
        if _is_wanted(key, value, p.tags())
    ]
    shown, told = page(p, rows)
    del told["NextToken"]
    return {"Tags": {"Tag": list(shown)}, **told}


def _is_wanted(key: str, value: str, tags: Mapping[str, str]) -> bool:
    return not tags or (key in tags and tags[key] in ("", value))


def _all(cloud: Cloud, kind: str) -> Mapping[str, Tagged]:
    world = cloud.world
    kinds: dict[str, Mapping[str, Tagged]] = {
        "instance": world.instances,
        "disk": world.disks,
        "snapshot": world.snapshots,
        "image": world.images,
        "securitygroup": world.security_groups,
        "keypair": world.key_pairs,
    }
    if kind not in kinds:
        raise ApiError(400, "InvalidResourceType.NotFound", "The ResourceType provided does not exist in our records.")
    return kinds[kind]


def _asked(cloud: Cloud, p: Parameters) -> list[Tagged]:
    there, wanted = _all(cloud, p.needed("ResourceType").lower()), p.strings("ResourceId")
    if not 1 <= len(wanted) <= MOST_RESOURCES:
        raise ApiError(400, "InvalidParameter.ResourceId", f"From 1 to {MOST_RESOURCES} ResourceId are allowed.")
    for name in wanted:
        if name not in there:
            raise ApiError(404, "InvalidResourceId.NotFound", "The specified ResourceId is not found in our records.")
    return [there[name] for name in wanted]
