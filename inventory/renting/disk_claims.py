"""Whose disk a new machine would get: nothing is made while that is open. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inventory.cloud.errors import RentError
from inventory.cloud.values import Disk, Instance
from inventory.renting import members


def refuse(disks: Sequence[Disk], instances: Sequence[Instance], numbers: Collection[int]) -> None:
    """Raises RentError where a machine to be made would get another disk than the one it should have.

    The kept disk of a machine that is being taken back is free in a few minutes; a blank one now would take its
    place for good. Of several that wait for the same machine none is taken for the right one.
    """
    there = {each.instance_id: each for each in instances}
    for k in sorted(numbers):
        own = [d for d in disks if d.kind == "data" and _number(d, there) == k]
        for disk in own:
            if _is_held(disk):
                raise RentError(
                    f"te{k} is being taken back, and its disk {disk.disk_id} ({disk.size_gib} GiB) is free when it is "
                    "gone: run the same command again in 5 minutes. A new machine now would get another disk"
                )
        waiting = sorted((d for d in own if d.status == "Available" and not d.instance_id), key=lambda d: d.created)
        if len(waiting) > 1:
            raise RentError(
                f"{len(waiting)} disks wait for te{k}: {', '.join(map(_told, waiting))}. Only one can be its data "
                "disk: delete the others, or take their tags, in the cloud's console; `fab down --disks` deletes all"
            )


def _number(disk: Disk, there: dict[str, Instance]) -> int | None:
    owner = there.get(disk.instance_id)
    return members.disk_number(disk) or (members.number(owner) if owner else None)


def _is_held(disk: Disk) -> bool:
    """Whether a disk outlives the machine that has it, and is not free yet. Asked of disks of missing machines."""
    return disk.status == "Detaching" or bool(disk.instance_id and not disk.delete_with_instance)


def _told(disk: Disk) -> str:
    return f"{disk.disk_id} ({disk.size_gib} GiB in {disk.zone_id}, of {disk.created:%Y-%m-%d %H:%M} UTC)"
