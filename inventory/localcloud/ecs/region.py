"""Actions about what a region has: regions, zones, instance types, images."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import catalogue, images
from inventory.localcloud.ecs.calls import STS, ApiError, Cloud, Parameters, action
from inventory.localcloud.ecs.catalogue import FAMILIES, IMAGE_GIB, IMAGE_ID, Type
from inventory.localcloud.ecs.listing import MOST_A_PAGE, page

_NOT_OF_A_FAMILY = {"BootMode", "DetectionOptions", "Features", "IsPublic", "LoginAsNonRootSupported", "OSNameEn"}
_NOT_OF_A_FAMILY |= {"ResourceGroupId"}
KBIT = 1024 * 1000
"""kbit/s in a Gbit/s as the API counts them."""


@action("GetCallerIdentity", STS)
def get_caller_identity(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Whose key it is: the account's owner's own."""
    account = cloud.world.account_id
    arn = f"acs:ram::{account}:root"
    return {"IdentityType": "Account", "AccountId": account, "PrincipalId": account, "UserId": account, "Arn": arn}


@action("DescribeRegions")
def describe_regions(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The one region that there is; calls for others are answered all the same."""
    region, port = cloud.world.region_id, cloud.world.port
    told = {
        "RegionId": region,
        "LocalName": "local cloud",
        "RegionEndpoint": f"127.0.0.1:{port}",
        "Status": "available",
    }
    return {"Regions": {"Region": [told]}}


@action("DescribeZones")
def describe_zones(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    zones = catalogue.zones(p.text("RegionId") or cloud.world.region_id)
    return {"Zones": {"Zone": [_zone(zone) for zone in zones]}}


def _zone(zone: str) -> dict[str, Any]:
    categories, types = [*catalogue.ESSD, *catalogue.OLDER], list(catalogue.TYPES)
    families = sorted({each.family for each in catalogue.TYPES.values()})
    resources = {
        "IoOptimized": True,
        "SystemDiskCategories": {"supportedSystemDiskCategory": categories},
        "DataDiskCategories": {"supportedDataDiskCategory": categories},
        "InstanceTypes": {"supportedInstanceType": types},
        "InstanceTypeFamilies": {"supportedInstanceTypeFamily": families},
        "InstanceGenerations": {"supportedInstanceGeneration": []},
        "NetworkTypes": {"supportedNetworkCategory": ["vpc"]},
    }
    return {
        "ZoneId": zone,
        "LocalName": f"local cloud {zone[-1]}",
        "ZoneType": "AvailabilityZone",
        "AvailableResourceCreation": {"ResourceTypes": ["VSwitch", "IoOptimized", "Instance", "Disk"]},
        "AvailableResources": {"ResourcesInfo": [resources]},
        "AvailableInstanceTypes": {"InstanceTypes": types},
        "AvailableDiskCategories": {"DiskCategories": categories},
        "AvailableVolumeCategories": {"VolumeCategories": []},
        "AvailableDedicatedHostTypes": {"DedicatedHostType": []},
        "DedicatedHostGenerations": {"DedicatedHostGeneration": []},
    }


@action("DescribeInstanceTypes")
def describe_instance_types(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """By name, family, GPU and size."""
    names = p.strings("InstanceTypes")
    if len(names) > 10:
        raise ApiError(400, "InvalidParameter.InstanceTypes", "At most 10 InstanceTypes can be asked for.")
    found = [each for each in catalogue.TYPES.values() if (not names or each.name in names) and _is_asked(each, p)]
    asked = min(p.number("MaxResults", MOST_A_PAGE), MOST_A_PAGE)
    shown, told = page(Parameters({**p.flat, "MaxResults": str(asked)}), found)
    return {"InstanceTypes": {"InstanceType": [_type(each) for each in shown]}, "NextToken": told["NextToken"]}


def _is_asked(of: Type, p: Parameters) -> bool:
    return (
        p.text("InstanceTypeFamily") in ("", of.family)
        and p.text("GPUSpec").lower() in ("", of.gpu_spec.lower())
        and p.number("MinimumGPUAmount") <= of.gpus <= p.number("MaximumGPUAmount", of.gpus)
        and p.number("MinimumCpuCoreCount") <= of.vcpus <= p.number("MaximumCpuCoreCount", of.vcpus)
        and p.decimal("MinimumMemorySize") <= of.memory_gib <= p.decimal("MaximumMemorySize", of.memory_gib)
    )


def _type(of: Type) -> dict[str, Any]:
    rate = int(of.rate_gbps * KBIT)
    return {
        "InstanceTypeId": of.name,
        "InstanceTypeFamily": of.family,
        "InstanceFamilyLevel": "EnterpriseLevel",
        "InstanceCategory": "Computing Acceleration" if of.gpus else "General-purpose",
        "CpuCoreCount": of.vcpus,
        "CpuArchitecture": "X86",
        "MemorySize": float(of.memory_gib),
        "GPUAmount": of.gpus,
        "GPUSpec": of.gpu_spec,
        "GPUMemorySize": float(of.gpu_memory_gib),
        "InstanceBandwidthRx": rate,
        "InstanceBandwidthTx": rate,
        "InstancePpsRx": 0,
        "InstancePpsTx": 0,
        "NvmeSupport": "required" if of.nvme else "unsupported",
        "EriQuantity": 1 if of.nvme else 0,
        "EniQuantity": 1,
        "EniPrivateIpAddressQuantity": 1,
        "DiskQuantity": 17,
        "LocalStorageCategory": "",
    }


@action("DescribeImages")
def describe_images(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The cloud's image and one's own, where the filters ask for them."""
    family, ids = p.text("ImageFamily"), p.text("ImageId")
    is_asked = (
        family in ("", *FAMILIES)
        and (not ids or IMAGE_ID in ids.split(","))
        and p.text("ImageOwnerAlias", "system") == "system"
        and p.text("OSType", "linux") == "linux"
        and p.text("Architecture", "x86_64") == "x86_64"
        and p.text("ImageName") in ("", IMAGE_ID)
    )
    is_asked = is_asked and not p.tags() and not p.text("SnapshotId")
    system = [image(family)] if is_asked else []
    own = [{**image(), **each} for each in images.asked(cloud, p)]
    shown, told = page(p, [*own, *system])
    del told["NextToken"]
    return {"RegionId": p.text("RegionId") or cloud.world.region_id, "Images": {"Image": list(shown)}, **told}


@action("DescribeImageFromFamily")
def describe_image_from_family(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    family = p.needed("ImageFamily")
    if family not in FAMILIES:
        raise ApiError(404, "InvalidImageFamily.NotFound", "The specified ImageFamily does not exist.")
    return {"Image": {name: value for name, value in image(family).items() if name not in _NOT_OF_A_FAMILY}}


def image(family: str = "") -> dict[str, Any]:
    """The image as the API tells of it; under the family it was asked by."""
    return {
        "ImageId": IMAGE_ID,
        "ImageName": IMAGE_ID,
        "ImageFamily": family or FAMILIES[0],
        "Description": "The local cloud's Debian, whatever family it was asked by",
        "ImageOwnerAlias": "system",
        "ImageVersion": "",
        "OSType": "linux",
        "OSName": "Debian 12 64位",
        "OSNameEn": "Debian 12 64 bit",
        "Platform": "Debian",
        "Architecture": "x86_64",
        "Size": IMAGE_GIB,
        "Status": "Available",
        "Progress": "100%",
        "Usage": "none",
        "ProductCode": "",
        "CreationTime": "2026-01-01T00:00:00Z",
        "BootMode": "BIOS",
        "IsPublic": True,
        "IsCopied": False,
        "IsSelfShared": "",
        "IsSubscribed": False,
        "IsSupportCloudinit": True,
        "IsSupportIoOptimized": True,
        "LoginAsNonRootSupported": False,
        "ResourceGroupId": "",
        "DetectionOptions": {},
        "Features": {"NvmeSupport": "unsupported"},
        "DiskDeviceMappings": {"DiskDeviceMapping": []},
        "Tags": {"Tag": []},
    }
