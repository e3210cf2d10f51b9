"""Images of one's own: made of the snapshot of a system disk, booted from, deleted."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import listing, stamps
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action, end_dry_run, new_id
from inventory.localcloud.ecs.world import Image

AVAILABLE_AFTER_S = 4.0
OWNERS = ("", "self")
LONGEST_NAME = 128


@action("CreateImage")
def create_image(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Of the snapshot of a system disk. Of a machine with all of its disks, as the cloud also does, it is not."""
    if p.text("InstanceId") or any(p.groups("DiskDeviceMapping")):
        told = "The emulator makes images of the snapshot of a system disk only."
        raise ApiError(400, "InvalidParameter.Unsupported", told)
    snapshot = cloud.world.snapshots.get(p.needed("SnapshotId"))
    if snapshot is None:
        raise ApiError(404, "InvalidSnapshotId.NotFound", "The specified SnapshotId does not exist.")
    if snapshot.disk_kind != "system":
        told = "The specified snapshot is not a system disk snapshot."
        raise ApiError(403, "OperationDenied.SnapshotNotAllowed", told)
    if snapshot.failed or cloud.now() < snapshot.accomplished_at:
        raise ApiError(403, "InvalidSnapshotId.NotReady", "The specified snapshot has not completed yet.")
    name = p.text("ImageName")
    if name.startswith(("acs:", "aliyun", "http://", "https://")) or not (name == "" or 2 <= len(name) <= LONGEST_NAME):
        raise ApiError(400, "InvalidImageName.Malformed", "The specified ImageName is wrongly formed.")
    if name and any(each.name == name for each in cloud.world.images.values()):
        raise ApiError(400, "InvalidImageName.Duplicated", "The specified Image name has already been used.")
    tags = listing.checked_tags(p)
    end_dry_run(p)
    made = Image(
        image_id=new_id("m-"),
        name=name,
        description=p.text("Description"),
        snapshot_id=snapshot.snapshot_id,
        size_gib=snapshot.disk_gib,
        created=cloud.now(),
        available_at=cloud.now() + AVAILABLE_AFTER_S,
        tags=tags,
    )
    cloud.world.images[made.image_id] = made
    return {"ImageId": made.image_id}


@action("DeleteImage")
def delete_image(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Its snapshot stays. By force also one that machines were made from; they go on running."""
    image = cloud.world.images.get(p.needed("ImageId"))
    if image is None:
        raise ApiError(404, "InvalidImageId.NotFound", "The specified ImageId does not exist.")
    used = any(each.image_id == image.image_id for each in cloud.world.instances.values())
    if used and not p.flag("Force"):
        raise ApiError(403, "ImageUsingByInstance", "The specified image is used by instances.")
    end_dry_run(p)
    del cloud.world.images[image.image_id]
    return {}


def is_ready(cloud: Cloud, image: Image) -> bool:
    """Whether machines can be made from it."""
    return cloud.now() >= image.available_at


def asked(cloud: Cloud, p: Parameters) -> list[dict[str, Any]]:
    """Those that the filters of DescribeImages fit; without a status only what can be used, as in the cloud."""
    ids, tags = p.text("ImageId"), p.tags()
    wanted = p.text("Status", "Available").split(",")
    return [
        shown(cloud, each)
        for each in cloud.world.images.values()
        if p.text("ImageFamily") == ""
        and (not ids or each.image_id in ids.split(","))
        and p.text("ImageOwnerAlias") in OWNERS
        and p.text("SnapshotId") in ("", each.snapshot_id)
        and p.text("ImageName") in ("", each.name)
        and _status(cloud, each) in wanted
        and listing.has_tags(each.tags, tags)
    ]


def _status(cloud: Cloud, each: Image) -> str:
    return "Available" if is_ready(cloud, each) else "Creating"


def shown(cloud: Cloud, each: Image) -> dict[str, Any]:
    """What differs from the cloud's own image."""
    done = min(1.0, (cloud.now() - each.created) / max(1e-3, each.available_at - each.created))
    mapping = {
        "Device": "/dev/xvda",
        "Type": "system",
        "SnapshotId": each.snapshot_id,
        "Size": str(each.size_gib),
        "Format": "",
        "ImportOSSBucket": "",
        "ImportOSSObject": "",
    }
    return {
        "ImageId": each.image_id,
        "ImageName": each.name,
        "ImageFamily": "",
        "Description": each.description,
        "ImageOwnerAlias": "self",
        "Size": each.size_gib,
        "Status": _status(cloud, each),
        "Progress": f"{int(done * 100)}%",
        "CreationTime": stamps.second(each.created),
        "IsPublic": False,
        "DiskDeviceMappings": {"DiskDeviceMapping": [mapping]},
        "Tags": listing.tag_list(each.tags),
    }
