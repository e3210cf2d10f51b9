"""Instances as DescribeInstances shows them, with all keys of the real API; the actions that make and change them."""

from __future__ import annotations

import hashlib
import uuid
from ipaddress import IPv4Network
from typing import Any, Literal

from inventory.localcloud.ecs import actions, catalogue, lifecycle, listing, power
from inventory.localcloud.ecs.account import EmulatedInstance
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action, end_dry_run, new_id
from inventory.localcloud.ecs.listing import fields_of, tag_list
from inventory.localcloud.ecs.run_request import RunRequest, checked, release_time
from inventory.localcloud.ecs.volumes import Volume, enter_disk

OS_NAME = "Debian 12 64 bit"


def shown(cloud: EmulatedCloud, instance: EmulatedInstance) -> dict[str, Any]:
    """One entry of Instances.Instance. `Tags` is absent where there are none, as in recordings."""
    of = catalogue.TYPES[instance.instance_type]
    answer = {
        **fields_of(instance, "InstanceId", "Status", "ZoneId", "InstanceType", "ImageId"),
        "InstanceName": instance.name,
        "HostName": instance.hostname,
        "Description": "",
        "RegionId": cloud.account.region_id,
        "ClusterId": "",
        "InstanceTypeFamily": of.family,
        "OSName": OS_NAME,
        "OSNameEn": OS_NAME,
        "OSType": "linux",
        "Cpu": of.vcpus,
        "Memory": int(of.memory_gib * 1024),
        "GPUAmount": of.gpus,
        "GPUSpec": of.gpu_spec,
        "SerialNumber": str(uuid.uuid5(uuid.NAMESPACE_OID, instance.instance_id)),
        **_times(instance),
        **_money(instance),
        **_network(instance),
        **_empty(),
        "StoppedMode": "KeepCharging" if instance.status == "Stopped" else "Not-applicable",
        "OperationLocks": {"LockReason": [{"LockReason": "Recycling", "LockMsg": ""}] if instance.noticed else []},
        "SecurityGroupIds": {"SecurityGroupId": list(instance.security_group_ids)},
        "MetadataOptions": {"HttpTokens": "optional", "HttpEndpoint": "enabled"},
        "CpuOptions": {"CoreCount": of.vcpus, "ThreadsPerCore": 1, "Numa": "ON"},
    }
    if instance.key_pair:
        answer["KeyPairName"] = instance.key_pair
    if instance.tags:
        answer["Tags"] = tag_list(instance.tags)
    return answer


def _times(instance: EmulatedInstance) -> dict[str, Any]:
    return {
        "CreationTime": actions.minute(instance.created),
        "StartTime": actions.minute(instance.created),
        "ExpiredTime": actions.NEVER_OF_A_MACHINE,
        "AutoReleaseTime": actions.minute(instance.release_at),
    }


def _money(instance: EmulatedInstance) -> dict[str, Any]:
    told: dict[str, Any] = {
        "InstanceChargeType": "PostPaid",
        "SpotStrategy": instance.spot_strategy,
        "SpotPriceLimit": instance.price_limit,
        "SaleCycle": "",
        "InternetChargeType": "PayByTraffic",
        "InternetMaxBandwidthOut": instance.public_mbps,
        "InternetMaxBandwidthIn": instance.public_mbps or -1,
    }
    if instance.spot_strategy != "NoSpot":
        told["SpotDuration"] = instance.spot_duration
        told["SpotInterruptionBehavior"] = "Terminate"
    return told


def _network(instance: EmulatedInstance) -> dict[str, Any]:
    address = instance.address
    digest = hashlib.sha256(instance.instance_id.encode()).hexdigest()
    interface = {
        "Type": "Primary",
        "NetworkInterfaceId": f"eni-{instance.instance_id.removeprefix('i-')}",
        "MacAddress": ":".join(["00", "16", "3e", digest[0:2], digest[2:4], digest[4:6]]),
        "PrimaryIpAddress": address,
        "PrivateIpSets": {"PrivateIpSet": [{"PrivateIpAddress": address, "Primary": True}]},
    }
    return {
        "InstanceNetworkType": "vpc",
        "VpcAttributes": {
            "VpcId": instance.vpc_id,
            "VSwitchId": instance.vswitch_id,
            "PrivateIpAddress": {"IpAddress": [address]},
            "NatIpAddress": "",
        },
        "PublicIpAddress": {"IpAddress": [address] if instance.public_mbps else []},
        "InnerIpAddress": {"IpAddress": []},
        "EipAddress": {"AllocationId": "", "IpAddress": "", "InternetChargeType": ""},
        "NetworkInterfaces": {"NetworkInterface": [interface]},
    }


def _empty() -> dict[str, Any]:
    return {
        "ResourceGroupId": "",
        "VlanId": "",
        "DeploymentSetId": "",
        "CreditSpecification": "",
        "IoOptimized": True,
        "DeviceAvailable": True,
        "DeletionProtection": False,
        "Recyclable": False,
        "ImageOptions": {},
        "PrivateDnsNameOptions": {},
        "HibernationOptions": {"Configured": False},
        "DedicatedHostAttribute": {"DedicatedHostId": "", "DedicatedHostName": "", "DedicatedHostClusterId": ""},
        "DedicatedInstanceAttribute": {"Tenancy": "", "Affinity": ""},
        "EcsCapacityReservationAttr": {"CapacityReservationPreference": "", "CapacityReservationId": ""},
    }


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
