"""RunInstances, and what is asked and changed about instances."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any, Literal

from inventory.localcloud.ecs import lifecycle, listing, power
from inventory.localcloud.ecs.account import EmulatedInstance
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action, end_dry_run, new_id
from inventory.localcloud.ecs.instance_shape import shown
from inventory.localcloud.ecs.run_request import RunRequest, checked, release_time
from inventory.localcloud.ecs.volumes import Volume, enter_disk

FIRST_OFFSET = 10
"""In the subnet: of the first machine's address."""
MOST_MACHINES = 999


@action("RunInstances")
def run_instances(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """RunRequest machines: all of them or none; they boot after the answer."""
    asked = checked(cloud, p)
    end_dry_run(p)
    made = [_enter(cloud, asked, number) for number in range(len(asked.names))]
    cloud.save()
    for instance in made:
        power.make(cloud, instance.instance_id)
    return {"InstanceIdSets": {"InstanceIdSet": [instance.instance_id for instance in made]}}


def _enter(cloud: EmulatedCloud, asked: RunRequest, number: int) -> EmulatedInstance:
    instance_id = new_id("i-")
    instance = EmulatedInstance(
        instance_id=instance_id,
        machine=_machine(cloud),
        name=asked.names[number] or instance_id,
        hostname=f"iZ{instance_id.removeprefix('i-')}Z",
        address=_address(cloud),
        created=cloud.now(),
        **asked.machine,
    )
    cloud.account.instances[instance_id] = instance
    _add_disk(cloud, instance, "system", asked.system)
    for volume in asked.data:
        _add_disk(cloud, instance, "data", volume)
    return instance


def _add_disk(
    cloud: EmulatedCloud, instance: EmulatedInstance, kind: Literal["system", "data"], volume: Volume
) -> None:
    disk = enter_disk(cloud, volume, kind, instance.zone_id, instance.tags)
    # As many as there are in one request: their order is the order of the request.
    disk.attached = cloud.now() + len(cloud.disks_of(instance.instance_id)) / 1e3
    disk.was_attached, disk.instance_id = True, instance.instance_id


def _machine(cloud: EmulatedCloud) -> str:
    """The next short name that no machine has."""
    taken = {instance.machine for instance in cloud.account.instances.values()}
    for number in [*range(cloud.account.next_machine, MOST_MACHINES + 1), *range(1, cloud.account.next_machine)]:
        if f"m{number}" not in taken:
            cloud.account.next_machine = number % MOST_MACHINES + 1
            return f"m{number}"
    raise ApiError(403, "QuotaExceed.ElasticQuota", "The emulator has no name left for another machine.")


def _address(cloud: EmulatedCloud) -> str:
    """The next address of the subnet; one of a machine that is gone only when all have been used."""
    subnet = IPv4Network(cloud.subnet)
    taken = {instance.address for instance in cloud.account.instances.values()}
    usable = range(FIRST_OFFSET, subnet.num_addresses - 1)
    after = cloud.account.last_offset + 1
    for offset in [*range(after, usable.stop), *range(usable.start, min(after, usable.stop))]:
        if str(subnet[offset]) not in taken:
            cloud.account.last_offset = offset
            return str(subnet[offset])
    raise ApiError(403, "QuotaExceeded.PrivateIpAddress", "Insufficient private ip addresses in the VSwitch.")


listing.describes("Instances", "Instance", shown, newest=True)


@action("ModifyInstanceAutoReleaseTime")
def modify_release_time(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """When it is to be released; left out: never."""
    instance = lifecycle.instance(cloud, p.needed("InstanceId"))
    if power.is_released(cloud, instance):
        lifecycle.refuse_status()
    instance.release_at = release_time(cloud, p.text("AutoReleaseTime"))
    return {}
