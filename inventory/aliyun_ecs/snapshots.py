"""Snapshots of disks. One action of the API a method, beside what it sends and hears."""

from __future__ import annotations

from collections.abc import Sequence

from inventory.aliyun_ecs.answer_fields import Answer, flag, listed, moment, needed, tags, whole
from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.request_fields import filters, tag_list
from inventory.cloud.values import Snapshot, Tags


class Snapshots(Caller):
    """Snapshots of one region."""

    def snapshots(
        self, *, tags: Tags | None = None, ids: Sequence[str] | None = None, disk_id: str = ""
    ) -> tuple[Snapshot, ...]:
        of_disk = {"DiskId": disk_id} if disk_id else {}
        found = tuple(
            snapshot
            for fields in filters("SnapshotIds", ids, tags)
            for answer in self.pages("DescribeSnapshots", {"RegionId": self.region_id, **of_disk, **fields})
            for snapshot in snapshots_in(answer)
        )
        if not found and ids is None:
            self.must_see("DescribeSnapshots")
        return found

    def create_snapshot(self, disk_id: str, name: str, tags: Tags | None, token: str, *, waits: bool = True) -> str:
        fields = {"DiskId": disk_id, "SnapshotName": name, "Tag": tag_list(tags), "ClientToken": token}
        return str(self.call("CreateSnapshot", fields, waits=waits)["SnapshotId"])

    def delete_snapshot(self, snapshot_id: str, force: bool = True) -> None:
        self.remove("DeleteSnapshot", {"SnapshotId": snapshot_id, "Force": force})


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
