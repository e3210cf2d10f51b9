"""Actions about VPCs and vSwitches, of the product Vpc and, as the older clients call them, of Ecs.

They are kept and told; the hosts themselves all sit in the cloud's own subnet.
"""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any

from inventory.localcloud.ecs import catalogue
from inventory.localcloud.ecs.calls import ECS, VPC, ApiError, Cloud, Parameters, action, end_dry_run, new_id
from inventory.localcloud.ecs.listing import page
from inventory.localcloud.ecs.stamps import second
from inventory.localcloud.ecs.world import Vpc, VSwitch

PENDING_S = 0.3
"""How long a new VPC cannot be used."""
RESERVED = 4
"""Addresses of a vSwitch that machines cannot have."""
_PRIVATE = tuple(IPv4Network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))


@action("CreateVpc", ECS)
@action("CreateVpc", VPC)
def create_vpc(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    cidr = _cidr(p.text("CidrBlock", "172.16.0.0/12"))
    if not any(cidr.subnet_of(private) for private in _PRIVATE):
        raise ApiError(400, "InvalidCidrBlock.Malformed", "Specified CIDR block is not valid.")
    end_dry_run(p)
    made = Vpc(vpc_id=new_id("vpc-"), name=p.text("VpcName"), cidr=str(cidr), created=cloud.now(), tags=p.tags())
    cloud.world.vpcs[made.vpc_id] = made
    return {"VpcId": made.vpc_id, "VRouterId": _router(made), "RouteTableId": made.vpc_id.replace("vpc-", "vtb-")}


@action("DescribeVpcs", ECS)
@action("DescribeVpcs", VPC)
def describe_vpcs(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    ids = [each for each in p.text("VpcId").split(",") if each]
    found = [
        each
        for each in cloud.world.vpcs.values()
        if (not ids or each.vpc_id in ids) and p.text("VpcName") in ("", each.name) and not p.flag("IsDefault")
    ]
    shown, told = page(p, found)
    return {"Vpcs": {"Vpc": [_vpc(cloud, each) for each in shown]}, **_numbered(told)}


def _vpc(cloud: Cloud, vpc: Vpc) -> dict[str, Any]:
    inside = [each.vswitch_id for each in cloud.world.vswitches.values() if each.vpc_id == vpc.vpc_id]
    return {
        "VpcId": vpc.vpc_id,
        "VpcName": vpc.name,
        "CidrBlock": vpc.cidr,
        "Status": "Available" if _is_ready(cloud, vpc) else "Pending",
        "RegionId": cloud.world.region_id,
        "CreationTime": second(vpc.created),
        "Description": "",
        "IsDefault": False,
        "VRouterId": _router(vpc),
        "VSwitchIds": {"VSwitchId": inside},
        "UserCidrs": {"UserCidr": []},
    }


@action("CreateVSwitch", ECS)
@action("CreateVSwitch", VPC)
def create_vswitch(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    vpc = ready_vpc(cloud, p.needed("VpcId"))
    zone, cidr = p.needed("ZoneId"), _cidr(p.needed("CidrBlock"))
    if zone not in catalogue.zones(p.text("RegionId") or cloud.world.region_id):
        raise ApiError(404, "InvalidZoneId.NotFound", "The specified zone does not exist.")
    if not cidr.subnet_of(IPv4Network(vpc.cidr)) or not 16 <= cidr.prefixlen <= 29:
        raise ApiError(400, "InvalidCidrBlock.Malformed", "Specified CIDR block is not valid.")
    others = [each for each in cloud.world.vswitches.values() if each.vpc_id == vpc.vpc_id]
    if any(cidr.overlaps(IPv4Network(each.cidr)) for each in others):
        raise ApiError(400, "InvalidCidrBlock.Overlapped", "Specified CIDR block overlapped with other subnets.")
    end_dry_run(p)
    made = VSwitch(
        vswitch_id=new_id("vsw-"),
        vpc_id=vpc.vpc_id,
        zone_id=zone,
        name=p.text("VSwitchName"),
        cidr=str(cidr),
        created=cloud.now(),
        tags=p.tags(),
    )
    cloud.world.vswitches[made.vswitch_id] = made
    return {"VSwitchId": made.vswitch_id}


@action("DescribeVSwitches", ECS)
@action("DescribeVSwitches", VPC)
def describe_vswitches(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    found = [
        each
        for each in cloud.world.vswitches.values()
        if p.text("VpcId") in ("", each.vpc_id)
        and p.text("ZoneId") in ("", each.zone_id)
        and p.text("VSwitchId") in ("", each.vswitch_id)
        and p.text("VSwitchName") in ("", each.name)
    ]
    shown, told = page(p, found)
    return {"VSwitches": {"VSwitch": [_vswitch(cloud, each) for each in shown]}, **_numbered(told)}


def _vswitch(cloud: Cloud, of: VSwitch) -> dict[str, Any]:
    used = sum(each.vswitch_id == of.vswitch_id for each in cloud.world.instances.values())
    return {
        "VSwitchId": of.vswitch_id,
        "VSwitchName": of.name,
        "VpcId": of.vpc_id,
        "ZoneId": of.zone_id,
        "CidrBlock": of.cidr,
        "Status": "Available",
        "AvailableIpAddressCount": IPv4Network(of.cidr).num_addresses - RESERVED - used,
        "CreationTime": second(of.created),
        "Description": "",
        "IsDefault": False,
    }


def ready_vpc(cloud: Cloud, vpc_id: str) -> Vpc:
    """Raises the API's InvalidVpcId.NotFound and IncorrectVpcStatus."""
    vpc = cloud.world.vpcs.get(vpc_id)
    if vpc is None:
        raise ApiError(404, "InvalidVpcId.NotFound", "Specified VPC does not exist.")
    if not _is_ready(cloud, vpc):
        raise ApiError(400, "IncorrectVpcStatus", "Current VPC status does not support this operation.")
    return vpc


def _is_ready(cloud: Cloud, vpc: Vpc) -> bool:
    return cloud.now() >= vpc.created + PENDING_S


def _router(vpc: Vpc) -> str:
    return vpc.vpc_id.replace("vpc-", "vrt-")


def _cidr(text: str) -> IPv4Network:
    try:
        return IPv4Network(text)
    except ValueError:
        raise ApiError(400, "InvalidCidrBlock.Malformed", "Specified CIDR block is not valid.") from None


def _numbered(told: dict[str, Any]) -> dict[str, Any]:
    """These lists know no NextToken."""
    return {name: value for name, value in told.items() if name != "NextToken"}
