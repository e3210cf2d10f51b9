"""Actions about what a region has: whose it is, regions, zones, instance types."""

from __future__ import annotations

from typing import Any

from inventory.aliyun_settings import REGIONS
from inventory.localcloud.ecs import catalogue
from inventory.localcloud.ecs.actions import STS, ApiError, EmulatedCloud, Parameters, action
from inventory.localcloud.ecs.catalogue import Type
from inventory.localcloud.ecs.listing import page

KBIT = 1024 * 1000
"""kbit/s in a Gbit/s as the API counts them."""


@action("GetCallerIdentity", STS)
def get_caller_identity(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Whose key it is: the account's owner's own."""
    account = cloud.account.account_id
    arn = f"acs:ram::{account}:root"
    return {"IdentityType": "Account", "AccountId": account, "PrincipalId": account, "UserId": account, "Arn": arn}


@action("DescribeRegions")
def describe_regions(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """All of them at one address; what was made is in the account's own."""
    told = [
        {
            "RegionId": region,
            "LocalName": "local cloud",
            "RegionEndpoint": f"127.0.0.1:{cloud.account.port}",
            "Status": "available",
        }
        for region in REGIONS
    ]
    return {"Regions": {"Region": told}}


@action("DescribeZones")
def describe_zones(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    told = [
        {
            "ZoneId": zone,
            "LocalName": f"local cloud {zone[-1]}",
            "ZoneType": "AvailabilityZone",
            "AvailableResourceCreation": {"ResourceTypes": ["VSwitch", "IoOptimized", "Instance", "Disk"]},
            "AvailableInstanceTypes": {"InstanceTypes": list(catalogue.TYPES)},
            "AvailableDiskCategories": {"DiskCategories": list(catalogue.CATEGORIES)},
        }
        for zone in catalogue.zones(p.text("RegionId") or cloud.account.region_id)
    ]
    return {"Zones": {"Zone": told}}


@action("DescribeInstanceTypes")
def describe_instance_types(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """By name, or with so many GPUs at least."""
    names, gpus = p.strings("InstanceTypes"), p.number("MinimumGPUAmount")
    if len(names) > 10:
        raise ApiError(400, "InvalidParameter.InstanceTypes", "At most 10 InstanceTypes can be asked for.")
    found = [each for each in catalogue.TYPES.values() if (not names or each.name in names) and each.gpus >= gpus]
    some, paging = page(Parameters({"MaxResults": "100", **p.flat}), found)
    return {"InstanceTypes": {"InstanceType": [_type(each) for each in some]}, "NextToken": paging["NextToken"]}


def _type(of: Type) -> dict[str, Any]:
    rate, nvme = int(of.rate_gbps * KBIT), of.family.startswith("ecs.gn8")
    return {
        "InstanceTypeId": of.name,
        "InstanceTypeFamily": of.family,
        "InstanceFamilyLevel": "EnterpriseLevel",
        "InstanceCategory": "Computing Acceleration" if of.gpus else "General-purpose",
        "CpuCoreCount": of.vcpus,
        "CpuArchitecture": "X86",
        "MemorySize": of.memory_gib,
        "GPUAmount": of.gpus,
        "GPUSpec": of.gpu_spec,
        "GPUMemorySize": of.gpu_memory_gib,
        "InstanceBandwidthRx": rate,
        "InstanceBandwidthTx": rate,
        "NvmeSupport": "required" if nvme else "unsupported",
        "EriQuantity": 1 if nvme else 0,
        "DiskQuantity": 17,
    }
