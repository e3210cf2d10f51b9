"""Tags of what there is: machines, disks, snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inventory.localcloud.ecs.account import Resource
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action, existing
from inventory.localcloud.ecs.listing import MOST_TAGS, checked_tags

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
    there = existing(kinds, p.needed("ResourceType").lower(), "ResourceType", 400)
    if not 1 <= len(p.strings("ResourceId")) <= MOST_RESOURCES:
        raise ApiError(400, "InvalidParameter.ResourceId", f"From 1 to {MOST_RESOURCES} ResourceId are allowed.")
    found = [existing(there, each, "ResourceId") for each in p.strings("ResourceId")]
    tags = checked_tags(p)
    if not tags:
        raise ApiError(400, "MissingParameter.Tag", "The input parameter Tag that is mandatory is missing.")
    if any(len({*each.tags, *tags}) > MOST_TAGS for each in found):
        raise ApiError(400, "InvalidTagCount", "The specified tags are beyond the permitted range.")
    for each in found:
        each.tags = {**each.tags, **tags}
    return {}
