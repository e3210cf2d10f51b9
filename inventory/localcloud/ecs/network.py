"""VPCs and vSwitches. They are kept and told; the hosts themselves all sit in the cloud's own subnet."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any

from inventory.localcloud.ecs import catalogue
from inventory.localcloud.ecs.account import EmulatedVpc, VSwitch
from inventory.localcloud.ecs.actions import (
    VPC,
    ApiError,
    EmulatedCloud,
    Parameters,
    action,
    end_dry_run,
    existing,
    new_id,
    second,
)
from inventory.localcloud.ecs.listing import describes, fields_of

PENDING_S = 0.3
"""How long a new VPC cannot be used."""
RESERVED = 4
"""Addresses of a vSwitch that machines cannot have."""
_PRIVATE = tuple(IPv4Network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))


@action("CreateVpc", VPC)
def create_vpc(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    cidr = _cidr(p.text("CidrBlock", "172.16.0.0/12"), _PRIVATE)
    end_dry_run(p)
    made = EmulatedVpc(vpc_id=new_id("vpc-"), name=p.text("VpcName"), cidr=str(cidr), created=cloud.now())
    cloud.account.vpcs[made.vpc_id] = made
    return {"VpcId": made.vpc_id, "VRouterId": _router(made), "RouteTableId": made.vpc_id.replace("vpc-", "vtb-")}


def _vpc(cloud: EmulatedCloud, vpc: EmulatedVpc) -> dict[str, Any]:
    return {
        "VpcId": vpc.vpc_id,
        "VpcName": vpc.name,
        "CidrBlock": vpc.cidr,
        "Status": "Available" if _is_ready(cloud, vpc) else "Pending",
        "RegionId": cloud.account.region_id,
        "CreationTime": second(vpc.created),
        "IsDefault": False,
        "VRouterId": _router(vpc),
        "VSwitchIds": {"VSwitchId": [each.vswitch_id for each in _vswitches(cloud, vpc)]},
    }


describe_vpcs = describes("Vpcs", "Vpc", _vpc, version=VPC, equal={"VpcId": "vpc_id"}, has_token=False)


@action("CreateVSwitch", VPC)
def create_vswitch(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    vpc = ready_vpc(cloud, p)
    zone, *_ = catalogue.zones(p.text("RegionId") or cloud.account.region_id, p.needed("ZoneId"))
    cidr = _cidr(p.needed("CidrBlock"), (IPv4Network(vpc.cidr),))
    if not 16 <= cidr.prefixlen <= 29:
        raise _malformed()
    if any(cidr.overlaps(IPv4Network(each.cidr)) for each in _vswitches(cloud, vpc)):
        raise ApiError(400, "InvalidCidrBlock.Overlapped", "Specified CIDR block overlapped with other subnets.")
    made = VSwitch(
        vswitch_id=new_id("vsw-"),
        vpc_id=vpc.vpc_id,
        zone_id=zone,
        name=p.text("VSwitchName"),
        cidr=str(cidr),
        created=cloud.now(),
    )
    cloud.account.vswitches[made.vswitch_id] = made
    return {"VSwitchId": made.vswitch_id}


def _vswitch(cloud: EmulatedCloud, of: VSwitch) -> dict[str, Any]:
    used = sum(each.vswitch_id == of.vswitch_id for each in cloud.account.instances.values())
    return {
        **fields_of(of, "VSwitchId", "VpcId", "ZoneId"),
        "VSwitchName": of.name,
        "CidrBlock": of.cidr,
        "Status": "Available",
        "AvailableIpAddressCount": IPv4Network(of.cidr).num_addresses - RESERVED - used,
        "CreationTime": second(of.created),
        "IsDefault": False,
    }


describe_vswitches = describes(
    "VSwitches", "VSwitch", _vswitch, version=VPC, equal={"VpcId": "vpc_id"}, has_token=False
)


def ready_vpc(cloud: EmulatedCloud, p: Parameters) -> EmulatedVpc:
    """The VPC a call names. Raises the API's InvalidVpcId.NotFound and IncorrectVpcStatus."""
    vpc = existing(cloud.account.vpcs, p.needed("VpcId"), "VpcId")
    if not _is_ready(cloud, vpc):
        raise ApiError(400, "IncorrectVpcStatus", "Current VPC status does not support this operation.")
    return vpc


def _is_ready(cloud: EmulatedCloud, vpc: EmulatedVpc) -> bool:
    return cloud.now() >= vpc.created + PENDING_S


def _vswitches(cloud: EmulatedCloud, vpc: EmulatedVpc) -> list[VSwitch]:
    return [each for each in cloud.account.vswitches.values() if each.vpc_id == vpc.vpc_id]


def _router(vpc: EmulatedVpc) -> str:
    return vpc.vpc_id.replace("vpc-", "vrt-")


def _cidr(text: str, within: tuple[IPv4Network, ...]) -> IPv4Network:
    try:
        cidr = IPv4Network(text)
    except ValueError:
        raise _malformed() from None
    if not any(cidr.subnet_of(each) for each in within):
        raise _malformed()
    return cidr


def _malformed() -> ApiError:
    return ApiError(400, "InvalidCidrBlock.Malformed", "Specified CIDR block is not valid.")
