"""Disks, their snapshots, and images. One action of the API a method, beside what it sends and hears."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.fields import (
    Answer,
    Fields,
    flag,
    given,
    listed,
    moment,
    moment_or_none,
    needed,
    tag_list,
    tags,
    whole,
)
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import Disk, Image, NewDisk, Snapshot, Tags


class Disks(Caller):
    """Disks, snapshots and images of one region."""

    def disks(
        self, *, tags: Tags | None = None, ids: Sequence[str] | None = None, instance_id: str = ""
    ) -> tuple[Disk, ...]:
        disks = self.owned("DescribeDisks", "DiskIds", ids, tags, disks_in, InstanceId=instance_id)
        self.note_new((disk.disk_id, disk.created) for disk in disks)
        return disks

    def create_disk(
        self,
        zone_id: str,
        disk: NewDisk,
        tags: Tags | None,
        token: str,
        *,
        attempts: Callable[[], None] | None = None,
    ) -> str:
        fields = new_disk_fields(self.region_id, zone_id, disk, tags or {}, token)
        return str(self.call("CreateDisk", fields, attempts=attempts)["DiskId"])

    def attach_disk(self, disk_id: str, instance_id: str, delete_with_instance: bool) -> None:
        fields: Fields = {
            "DiskId": disk_id,
            "InstanceId": instance_id,
            "DeleteWithInstance": delete_with_instance,
        }

        def attached(disk: Disk) -> bool:
            if disk.status == "In_use" and disk.instance_id != instance_id:
                raise CloudError(f"{disk_id} is attached to {disk.instance_id}: detach it there first", Kind.INPUT)
            return disk.status == "In_use"

        disk = self._attach(fields, attached, f"{disk_id}: not attached to {instance_id}")
        if disk.delete_with_instance != delete_with_instance:
            attributes = {"DiskId": disk_id, "DeleteWithInstance": delete_with_instance}
            self.call("ModifyDiskAttribute", {"RegionId": self.region_id, **attributes})

    def _attach(self, fields: Fields, done: Callable[[Disk], bool], what: str) -> Disk:
        """Make the call whenever the disk is still free, so that a lost answer or a busy disk does no harm."""
        disk_id = str(fields["DiskId"])

        def look() -> Disk | None:
            disks = self.disks(ids=[disk_id])
            if not disks and self.is_new(fields):
                return None
            if not disks:
                raise CloudError(f"{disk_id}: there is no such disk in {self.region_id}", Kind.NOT_FOUND)
            if done(disks[0]):
                return disks[0]
            if disks[0].status == "Available":
                try:
                    self.call("AttachDisk", fields, waits=False)
                except CloudError as error:
                    if error.kind is not Kind.WAIT:
                        raise
            return None

        return self.pace.until(look, what)

    def delete_disk(self, disk_id: str) -> None:
        self.remove("DeleteDisk", {"DiskId": disk_id})

    def snapshots(
        self, *, tags: Tags | None = None, ids: Sequence[str] | None = None, disk_id: str = ""
    ) -> tuple[Snapshot, ...]:
        return self.owned("DescribeSnapshots", "SnapshotIds", ids, tags, snapshots_in, DiskId=disk_id)

    def create_snapshot(self, disk_id: str, name: str, tags: Tags | None, token: str, *, waits: bool = True) -> str:
        fields = {"DiskId": disk_id, "SnapshotName": name, "Tag": tag_list(tags), "ClientToken": token}
        return str(self.call("CreateSnapshot", fields, waits=waits)["SnapshotId"])

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.remove("DeleteSnapshot", {"SnapshotId": snapshot_id, "Force": False})

    def image(self, name: str) -> Image:
        for key in ("ImageFamily",) if ":" in name else ("ImageId", "ImageFamily"):
            images = list(self.numbered_pages("DescribeImages", {key: name}, images_in))
            if images:
                return max(images, key=lambda each: each[0])[1]
        raise CloudError(
            f"there is no image {name!r} in {self.region_id}: name an id or a family, as acs:ubuntu_22_04_x64",
            Kind.NOT_FOUND,
        )


def new_disk_fields(region_id: str, zone_id: str, disk: NewDisk, labels: Tags, token: str) -> Fields:
    """CreateDisk; with a snapshot and a larger size the disk grows, without a size it is as large as it was."""
    fields: Fields = {"RegionId": region_id, "ZoneId": zone_id, "ClientToken": token, "Tag": tag_list(labels)}
    more = given(Size=disk.size_gib, SnapshotId=disk.snapshot_id, DiskName=disk.name)
    return fields | kind_fields(disk, "DiskCategory") | more


def kind_fields(disk: NewDisk, key: str) -> Fields:
    fields: Fields = {key: disk.category}
    if disk.performance_level and disk.category == "cloud_essd":
        fields["PerformanceLevel"] = disk.performance_level
    if disk.category == "cloud_auto":
        fields["BurstingEnabled"] = False  # is on by default in some regions, and costs extra
    return fields


def disks_in(answer: Answer) -> tuple[Disk, ...]:
    """DescribeDisks"""
    return tuple(_disk(each) for each in listed(answer, "Disks", "Disk"))


def _disk(each: Answer) -> Disk:
    return Disk(
        disk_id=needed(each, "DiskId"),
        serial=each.get("SerialNumber") or needed(each, "DiskId").removeprefix("d-"),
        kind=needed(each, "Type"),
        size_gib=whole(needed(each, "Size")),
        category=needed(each, "Category"),
        status=needed(each, "Status"),
        zone_id=needed(each, "ZoneId"),
        created=moment(needed(each, "CreationTime")),
        name=each.get("DiskName", ""),
        performance_level=each.get("PerformanceLevel") or "",
        instance_id=each.get("InstanceId") or "",
        delete_with_instance=flag(each.get("DeleteWithInstance", True)),
        source_snapshot_id=each.get("SourceSnapshotId") or "",
        tags=tags(each),
        detached=moment_or_none(each.get("DetachedTime")),
    )


def snapshots_in(answer: Answer) -> tuple[Snapshot, ...]:
    """DescribeSnapshots"""
    return tuple(_snapshot(each) for each in listed(answer, "Snapshots", "Snapshot"))


def _snapshot(each: Answer) -> Snapshot:
    size, remain = each.get("FullSnapshotSizeInBytes"), each.get("RemainTime")
    available = each.get("Available")
    return Snapshot(
        snapshot_id=needed(each, "SnapshotId"),
        name=each.get("SnapshotName", ""),
        disk_id=each.get("SourceDiskId", ""),
        disk_kind=each.get("SourceDiskType", "").lower(),
        disk_gib=whole(each.get("SourceDiskSize")),
        status=needed(each, "Status"),
        progress_percent=whole(str(each.get("Progress") or "0").rstrip("%")),
        # Answers of before 2023 do not have it: then only whole ones can be used.
        is_available=needed(each, "Status") == "accomplished" if available in (None, "") else flag(available),
        created=moment(needed(each, "CreationTime")),
        size_bytes=None if size in (None, "") else whole(size),
        remain_s=None if remain in (None, "") else whole(remain),
        tags=tags(each),
    )


def images_in(answer: Answer) -> tuple[tuple[str, Image], ...]:
    """DescribeImages: when each was made, and the image."""
    return tuple(
        (each.get("CreationTime", ""), Image(needed(each, "ImageId"), whole(each.get("Size"))))
        for each in listed(answer, "Images", "Image")
    )
