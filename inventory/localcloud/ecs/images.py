"""The one image that there is, found by its id or by any family."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import listing, times
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action
from inventory.localcloud.ecs.catalogue import FAMILIES, IMAGE_GIB, IMAGE_ID

MADE = 1767225600


def bootable(image_id: str) -> str:
    """The image for a machine. Raises ApiError."""
    if image_id != IMAGE_ID:
        raise ApiError(404, "InvalidImageId.NotFound", "The specified ImageId does not exist.")
    return image_id


@action("DescribeImages")
def describe_images(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """It, where all filters fit; it has no tags."""
    owner, family, ids = p.text("ImageOwnerAlias"), p.text("ImageFamily"), p.text("ImageId").split(",")
    fits = owner in ("", "system") and family in ("", *FAMILIES) and (ids == [""] or IMAGE_ID in ids)
    fits = fits and not p.tags() and "Available" in p.text("Status", "Available").split(",")
    some, paging = listing.page(p, [_shown(family)] if fits else [])
    del paging["NextToken"]
    return {"RegionId": p.text("RegionId") or cloud.account.region_id, "Images": {"Image": list(some)}, **paging}


def _shown(family: str) -> dict[str, Any]:
    """Under the family it was asked by."""
    return {
        "ImageId": IMAGE_ID,
        "ImageName": IMAGE_ID,
        "ImageFamily": family or FAMILIES[0],
        "Description": "The local cloud's Debian, whatever family it was asked by",
        "ImageOwnerAlias": "system",
        "OSType": "linux",
        "OSName": "Debian 12 64位",
        "OSNameEn": "Debian 12 64 bit",
        "Platform": "Debian",
        "Architecture": "x86_64",
        "Size": IMAGE_GIB,
        "Status": "Available",
        "Progress": "100%",
        "Usage": "none",
        "CreationTime": times.second(MADE),
        "BootMode": "BIOS",
        "IsPublic": True,
        "IsSupportCloudinit": True,
        "IsSupportIoOptimized": True,
        "DiskDeviceMappings": {"DiskDeviceMapping": []},
        "Tags": listing.tag_list({}),
    }
