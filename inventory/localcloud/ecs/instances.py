"""RunInstances, and what is asked and changed about instances."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network
from typing import Any, Literal

from inventory.localcloud.ecs import lifecycle, listing, power
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action, end_dry_run, new_id
from inventory.localcloud.ecs.instance_shape import shown
from inventory.localcloud.ecs.names import instance_names
from inventory.localcloud.ecs.orders import Order, checked, release_time
from inventory.localcloud.ecs.volumes import Volume
from inventory.localcloud.ecs.world import Disk, Instance

FIRST_OFFSET = 10
"""In the subnet: of the first machine's address."""
MOST_MACHINES = 999


@action("RunInstances")
def run_instances(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Order machines: all of them or none; they boot after the answer."""
    order = checked(cloud, p)
    end_dry_run(p)
    made = [_enter(cloud, order, number) for number in range(len(order.names))]
    cloud.save()
    for instance in made:
        power.make(cloud, instance.instance_id)
    return {"InstanceIdSets": {"InstanceIdSet": [instance.instance_id for instance in made]}}


def _enter(cloud: Cloud, order: Order, number: int) -> Instance:
    instance_id = new_id("i-")
    instance = Instance(
        instance_id=instance_id,
        machine=_machine(cloud),
        name=order.names[number] or instance_id,
        hostname=order.host_names[number] or f"iZ{instance_id.removeprefix('i-')}Z",
        address=_address(cloud),
        zone_id=order.vswitch.zone_id,
        instance_type=order.instance_type,
        image_id=order.image_id,
        image_snapshot_id=order.image_snapshot_id,
        vswitch_id=order.vswitch.vswitch_id,
        vpc_id=order.vswitch.vpc_id,
        security_group_ids=list(order.security_group_ids),
        created=cloud.now(),
        key_pair=order.key_pair,
        spot_strategy=order.spot_strategy,
        price_limit=order.price_limit,
        spot_duration=order.spot_duration,
        interruption_behavior=order.interruption_behavior,
        release_at=order.release_at,
        public_mbps=order.public_mbps,
        user_data=order.user_data,
        http_tokens=order.http_tokens,
        tags=dict(order.tags),
    )
    cloud.world.instances[instance_id] = instance
    _add_disk(cloud, instance, "system", order.system)
    for volume in order.data:
        _add_disk(cloud, instance, "data", volume)
    return instance


def _add_disk(cloud: Cloud, instance: Instance, kind: Literal["system", "data"], volume: Volume) -> None:
    disk = Disk(
        disk_id=new_id("d-"),
        kind=kind,
        size_gib=volume.size_gib,
        category=volume.category,
        performance_level=volume.performance_level,
        zone_id=instance.zone_id,
        created=cloud.now(),
        status="Creating",
        name=volume.name,
        description=volume.description,
        instance_id=instance.instance_id,
        delete_with_instance=volume.delete_with_instance,
        source_snapshot_id=volume.snapshot.snapshot_id if volume.snapshot else "",
        was_attached=True,
        # As many as there are in one order: their order is the order of the request.
        attached=cloud.now() + len(cloud.disks_of(instance.instance_id)) / 1e3,
        encrypted=volume.encrypted,
        tags=dict(instance.tags),
    )
    cloud.world.disks[disk.disk_id] = disk


def _machine(cloud: Cloud) -> str:
    """The next short name that no machine has."""
    taken = {instance.machine for instance in cloud.world.instances.values()}
    for number in [*range(cloud.world.next_machine, MOST_MACHINES + 1), *range(1, cloud.world.next_machine)]:
        if f"m{number}" not in taken:
            cloud.world.next_machine = number % MOST_MACHINES + 1
            return f"m{number}"
    raise ApiError(403, "QuotaExceed.ElasticQuota", "The emulator has no name left for another machine.")


def _address(cloud: Cloud) -> str:
    """The next address of the subnet; one of a machine that is gone only when all have been used."""
    subnet = IPv4Network(cloud.subnet)
    taken = {instance.address for instance in cloud.world.instances.values()}
    usable = range(FIRST_OFFSET, subnet.num_addresses - 1)
    after = cloud.world.last_offset + 1
    for offset in [*range(after, usable.stop), *range(usable.start, min(after, usable.stop))]:
        if str(subnet[offset]) not in taken:
            cloud.world.last_offset = offset
            return str(subnet[offset])
    raise ApiError(403, "QuotaExceeded.PrivateIpAddress", "Insufficient private ip addresses in the VSwitch.")


@action("DescribeInstances")
def describe_instances(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The instances all filters fit, newest first."""
    end_dry_run(p)
    found = sorted(_matching(cloud, p), key=lambda each: (-each.created, each.instance_id))
    some, paging = listing.page(p, found)
    return {"Instances": {"Instance": [shown(cloud, each) for each in some]}, **paging}


def _matching(cloud: Cloud, p: Parameters) -> Iterable[Instance]:
    wanted, tags = listing.ids(p, "InstanceIds"), p.tags()
    addresses = {each: p.json_strings(each) for each in ("PrivateIpAddresses", "PublicIpAddresses")}
    equal = {
        "Status": "status",
        "ZoneId": "zone_id",
        "VpcId": "vpc_id",
        "VSwitchId": "vswitch_id",
        "InstanceType": "instance_type",
        "ImageId": "image_id",
        "KeyPairName": "key_pair",
        "InstanceChargeType": "charge_type",
    }
    for each in cloud.world.instances.values():
        if wanted is not None and each.instance_id not in wanted:
            continue
        if any(p.text(name, str(getattr(each, field))) != getattr(each, field) for name, field in equal.items()):
            continue
        if not (listing.has_tags(each.tags, tags) and listing.is_named(each.name, p.text("InstanceName"))):
            continue
        if p.text("SecurityGroupId") and p.text("SecurityGroupId") not in each.security_group_ids:
            continue
        if p.text("LockReason") and not (each.noticed and p.text("LockReason").lower() == "recycling"):
            continue
        public = [each.address] if each.public_mbps else []
        mine = {"PrivateIpAddresses": [each.address], "PublicIpAddresses": public}
        if any(asked is not None and not set(mine[name]) & set(asked) for name, asked in addresses.items()):
            continue
        yield each


@action("DescribeInstanceStatus")
def describe_instance_status(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Ids and statuses only."""
    wanted = p.strings("InstanceId")
    found = [
        each
        for each in cloud.world.instances.values()
        if (not wanted or each.instance_id in wanted) and p.text("ZoneId", each.zone_id) == each.zone_id
    ]
    some, paging = listing.page(p, found)
    statuses = [{"InstanceId": each.instance_id, "Status": each.status} for each in some]
    del paging["NextToken"]
    return {"InstanceStatuses": {"InstanceStatus": statuses}, **paging}


@action("ModifyInstanceAttribute")
def modify_instance_attribute(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Name and description."""
    instance = lifecycle.instance(cloud, p.needed("InstanceId"))
    if p.text("InstanceName"):
        instance.name = instance_names(p.text("InstanceName"), 1, False)[0]
    if "Description" in p.flat:
        instance.description = p.text("Description")
    return {}


@action("ModifyInstanceAutoReleaseTime")
def modify_release_time(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """When it is to be released; left out: never."""
    instance = lifecycle.instance(cloud, p.needed("InstanceId"))
    if power.is_released(cloud, instance):
        lifecycle.refuse_status()
    instance.release_at = release_time(cloud, p.text("AutoReleaseTime"))
    return {}
