"""Images: the cloud's own, and those made of the snapshot of a system disk, booted from, deleted."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import listing, times
from inventory.localcloud.ecs.account import Image
from inventory.localcloud.ecs.actions import ApiError, Cloud, Parameters, action, end_dry_run, existing, new_id
from inventory.localcloud.ecs.catalogue import FAMILIES, IMAGE_GIB, IMAGE_ID

AVAILABLE_AFTER_S = 4.0
LONGEST_NAME = 128
SYSTEM = Image(image_id=IMAGE_ID, name=IMAGE_ID, snapshot_id="", size_gib=IMAGE_GIB, created=1767225600, available_at=0)


@action("CreateImage")
def create_image(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Of the snapshot of a system disk. Of a machine with all of its disks, as the cloud also does, it is not."""
    snapshot = existing(cloud.account.snapshots, p.needed("SnapshotId"), "SnapshotId")
    if snapshot.disk_kind != "system":
        told = "The specified snapshot is not a system disk snapshot."
        raise ApiError(403, "OperationDenied.SnapshotNotAllowed", told)
    if snapshot.failed or cloud.now() < snapshot.accomplished_at:
        raise ApiError(403, "InvalidSnapshotId.NotReady", "The specified snapshot has not completed yet.")
    name = p.text("ImageName")
    if name.startswith(("acs:", "aliyun", "http://", "https://")) or not (name == "" or 2 <= len(name) <= LONGEST_NAME):
        raise ApiError(400, "InvalidImageName.Malformed", "The specified ImageName is wrongly formed.")
    if name and any(each.name == name for each in cloud.account.images.values()):
        raise ApiError(400, "InvalidImageName.Duplicated", "The specified Image name has already been used.")
    tags = listing.checked_tags(p)
    end_dry_run(p)
    made = Image(
        image_id=new_id("m-"),
        name=name,
        snapshot_id=snapshot.snapshot_id,
        size_gib=snapshot.disk_gib,
        created=cloud.now(),
        available_at=cloud.now() + AVAILABLE_AFTER_S,
        tags=tags,
    )
    cloud.account.images[made.image_id] = made
    return {"ImageId": made.image_id}


@action("DeleteImage")
def delete_image(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Its snapshot stays. By force also one that machines were made from; they go on running."""
    image = existing(cloud.account.images, p.needed("ImageId"), "ImageId")
    used = any(each.image_id == image.image_id for each in cloud.account.instances.values())
    if used and not p.flag("Force"):
        raise ApiError(403, "ImageUsingByInstance", "The specified image is used by instances.")
    end_dry_run(p)
    del cloud.account.images[image.image_id]
    return {}


def bootable(cloud: Cloud, image_id: str) -> Image:
    """The image for a machine. Raises ApiError."""
    image = existing({IMAGE_ID: SYSTEM, **cloud.account.images}, image_id, "ImageId")
    if cloud.now() < image.available_at:
        raise ApiError(403, "ImageNotReady", "The specified image is not ready.")
    return image


@action("DescribeImages")
def describe_images(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Those all filters fit; without a status only what can be used, as in the cloud."""
    owner, family = p.text("ImageOwnerAlias"), p.text("ImageFamily")
    there = dict(cloud.account.images) if owner in ("", "self") and not family else {}
    if owner in ("", "system") and family in ("", *FAMILIES):
        there[IMAGE_ID] = SYSTEM
    ids, wanted = p.text("ImageId").split(","), p.text("Status", "Available").split(",")
    found = [
        told
        for each in listing.matching(p, there)
        if ids == [""] or each.image_id in ids
        if (told := _shown(cloud, each, family))["Status"] in wanted
    ]
    some, paging = listing.page(p, found)
    del paging["NextToken"]
    return {"RegionId": p.text("RegionId") or cloud.account.region_id, "Images": {"Image": list(some)}, **paging}


@action("DescribeImageFromFamily")
def describe_image_from_family(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    family = p.needed("ImageFamily")
    if family not in FAMILIES:
        raise ApiError(404, "InvalidImageFamily.NotFound", "The specified ImageFamily does not exist.")
    left_out = ("BootMode", "IsPublic", "OSNameEn")
    return {"Image": {name: value for name, value in _shown(cloud, SYSTEM, family).items() if name not in left_out}}


def _shown(cloud: Cloud, each: Image, family: str) -> dict[str, Any]:
    """The cloud's own is shown under the family it was asked by."""
    is_own = each is not SYSTEM
    done = min(1.0, (cloud.now() - each.created) / max(1e-3, each.available_at - each.created))
    mapping = {
        "Device": "/dev/xvda",
        "Type": "system",
        "SnapshotId": each.snapshot_id,
        "Size": str(each.size_gib),
    }
    return {
        "ImageId": each.image_id,
        "ImageName": each.name,
        "ImageFamily": "" if is_own else family or FAMILIES[0],
        "Description": "" if is_own else "The local cloud's Debian, whatever family it was asked by",
        "ImageOwnerAlias": "self" if is_own else "system",
        "OSType": "linux",
        "OSName": "Debian 12 64位",
        "OSNameEn": "Debian 12 64 bit",
        "Platform": "Debian",
        "Architecture": "x86_64",
        "Size": each.size_gib,
        "Status": "Available" if cloud.now() >= each.available_at else "Creating",
        "Progress": f"{int(done * 100)}%",
        "Usage": "none",
        "CreationTime": times.second(each.created),
        "BootMode": "BIOS",
        "IsPublic": not is_own,
        "IsSupportCloudinit": True,
        "IsSupportIoOptimized": True,
        "DiskDeviceMappings": {"DiskDeviceMapping": [mapping] if is_own else []},
        "Tags": listing.tag_list(each.tags),
    }
