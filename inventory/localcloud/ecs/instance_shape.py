"""An instance as DescribeInstances shows it: every key the real API has, empty where we have nothing to say. Pure."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

from inventory.localcloud.ecs import catalogue, times
from inventory.localcloud.ecs.account import EmulatedInstance
from inventory.localcloud.ecs.actions import EmulatedCloud
from inventory.localcloud.ecs.listing import fields_of, tag_list

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
        "CreationTime": times.minute(instance.created),
        "StartTime": times.minute(instance.created),
        "ExpiredTime": times.NEVER_OF_A_MACHINE,
        "AutoReleaseTime": times.minute(instance.release_at),
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
