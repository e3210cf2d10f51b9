"""VPCs, vSwitches, security groups and key pairs. They are kept and told: the hosts themselves all sit in the
cloud's own subnet, and nothing enforces the rules there."""

from __future__ import annotations

import hashlib
from ipaddress import IPv4Network
from typing import Any

from paramiko.pkey import PublicBlob

from inventory.localcloud.ecs import catalogue
from inventory.localcloud.ecs.account import EmulatedKeyPair, EmulatedSecurityGroup, EmulatedVpc, VSwitch
from inventory.localcloud.ecs.actions import (
    VPC,
    ApiError,
    EmulatedCloud,
    Parameters,
    action,
    end_dry_run,
    existing,
    minute,
    new_id,
    second,
)
from inventory.localcloud.ecs.listing import checked_tags, describes, fields_of, tag_list

PENDING_S = 0.3
"""How long a new VPC cannot be used."""
RESERVED = 4
"""Addresses of a vSwitch that machines cannot have."""


@action("CreateVpc", VPC)
def create_vpc(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    end_dry_run(p)
    cidr = p.text("CidrBlock", "172.16.0.0/12")
    made = EmulatedVpc(vpc_id=new_id("vpc-"), name=p.text("VpcName"), cidr=cidr, created=cloud.now())
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
    cidr = IPv4Network(p.needed("CidrBlock"))
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


# Security groups and key pairs. Rules are stored and listed; nothing enforces them in the hosts' network.

LARGEST = 2000
"""Machines in a group."""
_KEYS = ("IpProtocol", "PortRange", "SourceCidrIp", "SourceGroupId", "Policy", "Priority", "NicType")
"""What makes a rule the same as another."""


@action("CreateSecurityGroup")
def create_security_group(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    made = EmulatedSecurityGroup(
        vpc_id=ready_vpc(cloud, p).vpc_id,
        security_group_id=new_id("sg-"),
        name=p.text("SecurityGroupName"),
        created=cloud.now(),
        tags=checked_tags(p),
    )
    cloud.account.security_groups[made.security_group_id] = made
    return {"SecurityGroupId": made.security_group_id}


def _group(cloud: EmulatedCloud, of: EmulatedSecurityGroup) -> dict[str, Any]:
    used = sum(of.security_group_id in each.security_group_ids for each in cloud.account.instances.values())
    return {
        **fields_of(of, "SecurityGroupId", "VpcId"),
        "SecurityGroupName": of.name,
        "SecurityGroupType": "normal",
        "CreationTime": second(of.created),
        "AvailableInstanceAmount": LARGEST - used,
        "EcsCount": used,
        "RuleCount": len(of.rules),
        "Tags": tag_list(of.tags),
    }


describe_security_groups = describes("SecurityGroups", "SecurityGroup", _group, equal={"VpcId": "vpc_id"})


@action("DescribeSecurityGroupAttribute")
def describe_security_group_attribute(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Those of ingress; what leaves is always let through."""
    of = group(cloud, p)
    return {
        "RegionId": cloud.account.region_id,
        **fields_of(of, "SecurityGroupId", "VpcId"),
        "SecurityGroupName": of.name,
        "InnerAccessPolicy": "Accept",
        "Permissions": {"Permission": of.rules},
    }


@action("AuthorizeSecurityGroup")
def authorize_security_group(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """A rule that is there already is no error and is not added again."""
    of = group(cloud, p)
    wanted = [_rule(each) for each in p.groups("Permissions")]
    missing = [rule for rule in wanted if not any(_is_same(rule, other) for other in of.rules)]
    made = {"CreateTime": second(cloud.now()), "Direction": "ingress"}
    of.rules = [*of.rules, *({**rule, **made, "SecurityGroupRuleId": new_id("sgr-")} for rule in missing)]
    return {}


@action("RevokeSecurityGroup")
def revoke_security_group(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """By the rules' ids or by what they say. A rule that is not there is no error."""
    of = group(cloud, p)
    named = p.strings("SecurityGroupRuleId")
    rules = [] if named else [_rule(each) for each in p.groups("Permissions")]
    of.rules = [
        rule
        for rule in of.rules
        if rule["SecurityGroupRuleId"] not in named and not any(_is_same(rule, other) for other in rules)
    ]
    return {}


def group(cloud: EmulatedCloud, p: Parameters) -> EmulatedSecurityGroup:
    """Raises the API's InvalidSecurityGroupId.NotFound."""
    return existing(cloud.account.security_groups, p.needed("SecurityGroupId"), "SecurityGroupId")


def _is_same(rule: dict[str, str], other: dict[str, str]) -> bool:
    return all(rule[key] == other[key] for key in _KEYS)


def _rule(p: Parameters) -> dict[str, str]:
    """A rule of a request."""
    return {
        "IpProtocol": p.needed("IpProtocol").upper(),
        "PortRange": p.needed("PortRange"),
        "SourceCidrIp": p.text("SourceCidrIp"),
        "SourceGroupId": p.text("SourceGroupId"),
        "Policy": p.text("Policy", "accept").capitalize(),
        "Priority": p.text("Priority", "1"),
        "NicType": "intranet",
        "Description": p.text("Description"),
    }


@action("ImportKeyPair")
def import_key_pair(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """The name is taken once and for all: another key under it, or the same again, is refused."""
    name, body = p.needed("KeyPairName"), p.needed("PublicKeyBody").strip()
    fingerprint = fingerprint_of(body)
    if name in cloud.account.key_pairs:
        raise ApiError(400, "KeyPair.AlreadyExist", "The key pair already exist.")
    tags = checked_tags(p)
    made = EmulatedKeyPair(name=name, public_key=body, fingerprint=fingerprint, created=cloud.now(), tags=tags)
    cloud.account.key_pairs[name] = made
    return {"KeyPairName": name, "KeyPairFingerPrint": fingerprint}


def _shown(cloud: EmulatedCloud, each: EmulatedKeyPair) -> dict[str, Any]:
    return {
        "KeyPairName": each.name,
        "KeyPairFingerPrint": each.fingerprint,
        "CreationTime": minute(each.created),
        "Tags": tag_list(each.tags),
    }


describe_key_pairs = describes("KeyPairs", "KeyPair", _shown, equal={"KeyPairName": "name"}, has_token=False)


@action("DeleteKeyPairs")
def delete_key_pairs(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Machines that have the key keep it. Names that are not there are no error."""
    for name in p.json_strings("KeyPairNames") or []:
        cloud.account.key_pairs.pop(name, None)
    return {}


def fingerprint_of(public_key: str) -> str:
    """MD5 of an OpenSSH key's blob, as hexadecimal digits without colons. Raises InvalidPublicKeyBody.Malformed."""
    try:
        blob = PublicBlob.from_string(public_key).key_blob
    except ValueError:
        message = "The PublicKeyBody format is not supported."
        raise ApiError(400, "InvalidPublicKeyBody.Malformed", message) from None
    return hashlib.md5(blob, usedforsecurity=False).hexdigest()
