"""Disks and snapshots. Thin: one action of the API a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inventory.api import answers, requests
from inventory.api.caller import Caller
from inventory.api.errors import CloudError, Kind
from inventory.api.requests import Fields
from inventory.api.values import Disk, NewDisk, Snapshot, Tags


class DiskCalls(Caller):
    """Disks and snapshots of one region."""

    def disks(
        self, *, tags: Tags | None = None, ids: Sequence[str] | None = None, instance_id: str = ""
    ) -> tuple[Disk, ...]:
        """The disks with all these tags, one of these ids, attached to this machine.

        Raises CloudError (AUTH) where there are none because this key may not see any; so does `snapshots`.
        """
        of_instance = {"InstanceId": instance_id} if instance_id else {}
        found = tuple(
            disk
            for fields in requests.filters("DiskIds", ids, tags)
            for answer in self.pages("DescribeDisks", {"RegionId": self.region_id, **of_instance, **fields})
            for disk in answers.disks(answer)
        )
        self.note_new((disk.disk_id, disk.created) for disk in found)
        if not found and ids is None:
            self.must_see("DescribeDisks")
        return found

    def create_disk(
        self,
        zone_id: str,
        disk: NewDisk,
        tags: Tags | None,
        token: str,
        *,
        attempts: Callable[[], None] | None = None,
    ) -> str:
        """A new disk's id; it is being made at first, and maybe not listed. `attempts`: called before each attempt."""
        fields = requests.create_disk(self.region_id, zone_id, disk, tags or {}, token)
        return str(self.call("CreateDisk", fields, attempts=attempts)["DiskId"])

    def attach_disk(self, disk_id: str, instance_id: str, delete_with_instance: bool) -> None:
        """Attach a disk and wait until the machine has it. One that is attached there already is no error."""
        fields: Fields = {
            "DiskId": disk_id,
            "InstanceId": instance_id,
            "DeleteWithInstance": delete_with_instance,
        }

        def attached(disk: Disk) -> bool:
            if disk.status == "In_use" and disk.instance_id != instance_id:
                raise CloudError(f"{disk_id} is attached to {disk.instance_id}: detach it there first", Kind.INPUT)
            return disk.status == "In_use"

        self._move("AttachDisk", fields, "Available", attached, f"{disk_id}: not attached to {instance_id}")

    def detach_disk(self, disk_id: str, instance_id: str) -> None:
        """Detach a disk (unmounted before) and wait until it is free. One that is free already is no error."""
        fields: Fields = {"DiskId": disk_id, "InstanceId": instance_id}
        what = f"{disk_id}: not detached from {instance_id}"
        self._move("DetachDisk", fields, "In_use", lambda disk: disk.status == "Available", what)

    def _move(self, action: str, fields: Fields, before: str, done: Callable[[Disk], bool], what: str) -> None:
        """Make the call whenever the disk is still as before, so that a lost answer or a busy disk does no harm."""
        disk_id = str(fields["DiskId"])

        def look() -> bool | None:
            found = self.disks(ids=[disk_id])
            if not found and self.is_new(fields):
                return None
            if not found:
                raise CloudError(f"{disk_id}: there is no such disk in {self.region_id}", Kind.NOT_FOUND)
            if done(found[0]):
                return True
            if found[0].status == before:
                try:
                    self.call(action, fields, waits=False)
                except CloudError as error:
                    if error.kind is not Kind.WAIT:
                        raise
            return None

        self.until(look, what)

    def delete_disk(self, disk_id: str) -> None:
        """Delete a free disk. One that is gone already is no error."""
        self._gone("DeleteDisk", {"DiskId": disk_id})

    def keep_disk(self, disk_id: str, delete_with_instance: bool) -> None:
        """Whether the disk goes when its machine does."""
        fields = {"RegionId": self.region_id, "DiskId": disk_id, "DeleteWithInstance": delete_with_instance}
        self.call("ModifyDiskAttribute", fields)

    def snapshots(
        self, *, tags: Tags | None = None, ids: Sequence[str] | None = None, disk_id: str = ""
    ) -> tuple[Snapshot, ...]:
        """The snapshots with all these tags, one of these ids, of this disk."""
        of_disk = {"DiskId": disk_id} if disk_id else {}
        found = tuple(
            snapshot
            for fields in requests.filters("SnapshotIds", ids, tags)
            for answer in self.pages("DescribeSnapshots", {"RegionId": self.region_id, **of_disk, **fields})
            for snapshot in answers.snapshots(answer)
        )
        if not found and ids is None:
            self.must_see("DescribeSnapshots")
        return found

    def create_snapshot(self, disk_id: str, name: str, tags: Tags | None, token: str, retention_days: int = 0) -> str:
        """A new snapshot's id; what is written to the disk after this is not in it. 0 days: kept for ever."""
        fields: Fields = {
            "DiskId": disk_id,
            "SnapshotName": name,
            "Tag": requests.tags(tags),
            "ClientToken": token,
        }
        if retention_days:
            fields["RetentionDays"] = retention_days
        return str(self.call("CreateSnapshot", fields)["SnapshotId"])

    def delete_snapshot(self, snapshot_id: str, force: bool = True) -> None:
        """Delete a snapshot; forced also where disks made from it exist. One that is gone already is no error."""
        self._gone("DeleteSnapshot", {"SnapshotId": snapshot_id, "Force": force})

    def _gone(self, action: str, fields: Fields) -> None:
        try:
            self.call(action, fields)
        except CloudError as error:
            if error.kind is not Kind.NOT_FOUND:
                raise
