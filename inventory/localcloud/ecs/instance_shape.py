"""An instance as DescribeInstances shows it: every key the real API has, empty where we have nothing to say. Pure."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

from inventory.localcloud.ecs import sold, stamps
from inventory.localcloud.ecs.calls import Cloud
from inventory.localcloud.ecs.listing import tag_list
from inventory.localcloud.ecs.world import Instance


def shown(cloud: Cloud, instance: Instance) -> dict[str, Any]:
    """One entry of Instances.Instance. `Tags` is absent where there are none, as in recordings."""
    spec = sold.spec(instance.instance_type) or sold.Spec(1, 1024)
    image = sold.image(cloud, instance.image_id, "")
    os_name = image.os_name if image else ""
    answer = {
        "InstanceId": instance.instance_id,
        "InstanceName": instance.name,
        "HostName": instance.hostname,
        "Status": instance.status,
        "Description": instance.description,
        "RegionId": cloud.world.region_id,
        "ZoneId": instance.zone_id,
        "ClusterId": "",
        "InstanceType": instance.instance_type,
        "InstanceTypeFamily": instance.instance_type.rsplit(".", 1)[0].partition("-")[0],
        "ImageId": instance.image_id,
        "OSName": os_name,
        "OSNameEn": os_name,
        "OSType": "linux",
        "Cpu": spec.vcpus,
        "Memory": spec.memory_mib,
        "GPUAmount": spec.gpus,
        "GPUSpec": spec.gpu_spec,
        "SerialNumber": str(uuid.uuid5(uuid.NAMESPACE_OID, instance.instance_id)),
        **_times(instance),
        **_money(instance),
        **_network(instance),
        **_empty(),
        "StoppedMode": instance.stopped_mode,
        "OperationLocks": {"LockReason": [{"LockReason": "Recycling", "LockMsg": ""}] if instance.noticed else []},
        "SecurityGroupIds": {"SecurityGroupId": list(instance.security_group_ids)},
        "MetadataOptions": {"HttpTokens": instance.http_tokens, "HttpEndpoint": "enabled"},
        "CpuOptions": {"CoreCount": spec.vcpus, "ThreadsPerCore": 1, "Numa": "ON"},
    }
    if instance.key_pair:
        answer["KeyPairName"] = instance.key_pair
    if instance.tags:
        answer["Tags"] = tag_list(instance.tags)
    return answer


def _times(instance: Instance) -> dict[str, Any]:
    return {
        "CreationTime": stamps.minute(instance.created),
        "StartTime": stamps.minute(instance.created),
        "ExpiredTime": stamps.NEVER_OF_A_MACHINE,
        "AutoReleaseTime": stamps.minute(instance.release_at),
    }


def _money(instance: Instance) -> dict[str, Any]:
    told: dict[str, Any] = {
        "InstanceChargeType": instance.charge_type,
        "SpotStrategy": instance.spot_strategy,
        "SpotPriceLimit": instance.price_limit,
        "SaleCycle": "",
        "InternetChargeType": "PayByTraffic",
        "InternetMaxBandwidthOut": instance.public_mbps,
        "InternetMaxBandwidthIn": instance.public_mbps or -1,
    }
    if instance.spot_strategy != "NoSpot":
        told["SpotDuration"] = instance.spot_duration
        told["SpotInterruptionBehavior"] = instance.interruption_behavior
    return told


def _network(instance: Instance) -> dict[str, Any]:
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
