"""The API's answers about machines, disks and snapshots, as plain dicts, into our values. Pure.

CloudError: something that every answer has is missing.
"""

from __future__ import annotations

from inventory.api.answer_fields import (
    Answer,
    first,
    flag,
    listed,
    moment,
    moment_or_none,
    needed,
    number,
    tags,
    whole,
)
from inventory.api.values import Disk, Instance, Snapshot


def instances(answer: Answer) -> tuple[Instance, ...]:
    """DescribeInstances"""
    return tuple(_instance(each) for each in listed(answer, "Instances", "Instance"))


def _instance(each: Answer) -> Instance:
    eip = (each.get("EipAddress") or {}).get("IpAddress", "")
    return Instance(
        instance_id=needed(each, "InstanceId"),
        name=each.get("InstanceName", ""),
        status=needed(each, "Status"),
        instance_type=needed(each, "InstanceType"),
        zone_id=needed(each, "ZoneId"),
        created=moment(needed(each, "CreationTime")),
        private_address=first(listed(each, "VpcAttributes", "PrivateIpAddress", "IpAddress"))
        or first(listed(each, "InnerIpAddress", "IpAddress")),
        public_address=first(listed(each, "PublicIpAddress", "IpAddress")) or eip,
        gpus=whole(each.get("GPUAmount")),
        spot_strategy=each.get("SpotStrategy") or "NoSpot",
        price_limit=number(each.get("SpotPriceLimit")),
        spot_duration_h=whole(each.get("SpotDuration")),
        release_at=moment_or_none(each.get("AutoReleaseTime")),
        locks=tuple(needed(lock, "LockReason").lower() for lock in listed(each, "OperationLocks", "LockReason")),
        key_pair=each.get("KeyPairName") or "",
        vswitch_id=(each.get("VpcAttributes") or {}).get("VSwitchId", ""),
        tags=tags(each),
    )


def disks(answer: Answer) -> tuple[Disk, ...]:
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
    )


def snapshots(answer: Answer) -> tuple[Snapshot, ...]:
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
