"""Actions about security groups. Rules are kept and told; nothing enforces them in the hosts' network."""

from __future__ import annotations

import re
from ipaddress import IPv4Network
from typing import Any

from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action, end_dry_run, new_id
from inventory.localcloud.ecs.listing import checked_tags, has_tags, ids, is_named, page, tag_list
from inventory.localcloud.ecs.network import ready_vpc
from inventory.localcloud.ecs.stamps import second
from inventory.localcloud.ecs.world import SecurityGroup

LARGEST = 2000
"""Machines in a group."""
MOST_RULES = 200
_PROTOCOLS = ("TCP", "UDP", "ICMP", "GRE", "ALL")
_KEYS = ("IpProtocol", "PortRange", "SourceCidrIp", "SourceGroupId", "Policy", "Priority", "NicType")
"""What makes a rule the same as another."""
_SHOWN_EMPTY = (
    "DestCidrIp DestGroupId DestGroupName DestGroupOwnerAccount DestPrefixListId DestPrefixListName Ipv6DestCidrIp"
    " Ipv6SourceCidrIp SourceGroupName SourceGroupOwnerAccount SourcePortRange SourcePrefixListId SourcePrefixListName"
)


@action("CreateSecurityGroup")
def create_security_group(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    if not p.text("VpcId"):
        raise ApiError(403, "InvalidVpcId.NotFound", "vpc id must not empty when only support vpc vm.")
    vpc, name = ready_vpc(cloud, p.text("VpcId")), p.text("SecurityGroupName")
    if name and (not 2 <= len(name) <= 128 or name.startswith(("http://", "https://"))):
        raise ApiError(400, "InvalidSecurityGroupName.Malformed", "Specified security group name is not valid.")
    tags = checked_tags(p)
    end_dry_run(p)
    made = SecurityGroup(
        security_group_id=new_id("sg-"),
        name=name,
        vpc_id=vpc.vpc_id,
        created=cloud.now(),
        description=p.text("Description"),
        tags=tags,
    )
    cloud.world.security_groups[made.security_group_id] = made
    return {"SecurityGroupId": made.security_group_id}


@action("DescribeSecurityGroups")
def describe_security_groups(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    wanted = ids(p, "SecurityGroupIds")
    if p.text("SecurityGroupId"):
        wanted = [p.text("SecurityGroupId")]
    found = [
        each
        for each in cloud.world.security_groups.values()
        if (wanted is None or each.security_group_id in wanted)
        and p.text("VpcId") in ("", each.vpc_id)
        and is_named(each.name, p.text("SecurityGroupName"))
        and has_tags(each.tags, p.tags())
    ]
    shown, told = page(p, found)
    groups = [_group(cloud, each) for each in shown]
    return {"RegionId": cloud.world.region_id, "SecurityGroups": {"SecurityGroup": groups}, **told}


def _group(cloud: Cloud, of: SecurityGroup) -> dict[str, Any]:
    used = len(_members(cloud, of.security_group_id))
    return {
        "SecurityGroupId": of.security_group_id,
        "SecurityGroupName": of.name,
        "SecurityGroupType": "normal",
        "VpcId": of.vpc_id,
        "CreationTime": second(of.created),
        "Description": of.description,
        "AvailableInstanceAmount": LARGEST - used,
        "EcsCount": used,
        "RuleCount": len(of.rules),
        "ResourceGroupId": "",
        "ServiceManaged": False,
        "Tags": tag_list(of.tags),
    }


@action("DescribeSecurityGroupAttribute")
def describe_security_group_attribute(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Only ingress has rules; what leaves is always let through."""
    of = group(cloud, p.needed("SecurityGroupId"))
    rules = [] if p.text("Direction") == "egress" else of.rules
    empty = dict.fromkeys(_SHOWN_EMPTY.split(), "")
    return {
        "RegionId": cloud.world.region_id,
        "SecurityGroupId": of.security_group_id,
        "SecurityGroupName": of.name,
        "VpcId": of.vpc_id,
        "Description": of.description,
        "InnerAccessPolicy": "Accept",
        "Permissions": {"Permission": [{**empty, **rule} for rule in rules]},
    }


@action("AuthorizeSecurityGroup")
def authorize_security_group(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """A rule that is there already is no error and is not added again."""
    of = group(cloud, p.needed("SecurityGroupId"))
    wanted = [_rule(cloud, of, each) for each in _permissions(p)]
    missing = [rule for rule in wanted if not any(_is_same(rule, other) for other in of.rules)]
    if len(of.rules) + len(missing) > MOST_RULES:
        told = "The limit of authorization records in the security group reaches."
        raise ApiError(403, "AuthorizationLimitExceed", told)
    made = {"CreateTime": second(cloud.now()), "Direction": "ingress"}
    of.rules = [*of.rules, *({**rule, **made, "SecurityGroupRuleId": new_id("sgr-")} for rule in missing)]
    return {}


@action("RevokeSecurityGroup")
def revoke_security_group(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """By the rules' ids or by what they say. A rule that is not there is no error."""
    of = group(cloud, p.needed("SecurityGroupId"))
    named = p.strings("SecurityGroupRuleId")
    told = [] if named else [_rule(cloud, of, each) for each in _permissions(p)]
    of.rules = [
        rule
        for rule in of.rules
        if rule["SecurityGroupRuleId"] not in named and not any(_is_same(rule, other) for other in told)
    ]
    return {}


@action("DeleteSecurityGroup")
def delete_security_group(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    of = group(cloud, p.needed("SecurityGroupId"))
    others = [each for each in cloud.world.security_groups.values() if each is not of]
    is_named_by_another = any(rule["SourceGroupId"] == of.security_group_id for o in others for rule in o.rules)
    if _members(cloud, of.security_group_id) or is_named_by_another:
        told = "There is still instance(s) in the specified security group, or another group's rule names it."
        raise ApiError(403, "DependencyViolation", told)
    del cloud.world.security_groups[of.security_group_id]
    return {}


def group(cloud: Cloud, security_group_id: str) -> SecurityGroup:
    """Raises the API's InvalidSecurityGroupId.NotFound."""
    found = cloud.world.security_groups.get(security_group_id)
    if found is None:
        raise ApiError(404, "InvalidSecurityGroupId.NotFound", "The specified SecurityGroupId does not exist.")
    return found


def _members(cloud: Cloud, security_group_id: str) -> list[str]:
    machines = cloud.world.instances.values()
    return [each.instance_id for each in machines if security_group_id in each.security_group_ids]


def _permissions(p: Parameters) -> list[Parameters]:
    """Permissions.N, or the older flat parameters."""
    return list(p.groups("Permissions")) or [p]


def _is_same(rule: dict[str, str], other: dict[str, str]) -> bool:
    return all(rule[key] == other[key] for key in _KEYS)


def _rule(cloud: Cloud, of: SecurityGroup, p: Parameters) -> dict[str, str]:
    """A checked rule of a request."""
    protocol, ports = p.needed("IpProtocol").upper(), p.needed("PortRange")
    if protocol not in _PROTOCOLS:
        told = "The parameter IpProtocol must be specified with case insensitive TCP, UDP, ICMP, GRE or All."
        raise ApiError(400, "InvalidIpProtocol.ValueNotSupported", told)
    if not _fits(protocol, ports):
        raise ApiError(400, "InvalidIpProtocol.Malformed", 'The specified parameter "PortRange" is not valid.')
    source, source_group = p.text("SourceCidrIp"), p.text("SourceGroupId")
    if not source and not source_group:
        raise ApiError(400, "MissingParameter.Source", "Either SourceCidrIp or SourceGroupId must be specified.")
    if source and not _is_cidr(source):
        told = 'The specified parameter "SourceCidrIp" is not valid.'
        raise ApiError(400, "InvalidSourceCidrIp.Malformed", told)
    if source_group and source_group not in cloud.world.security_groups:
        told = "The SourceGroupId provided does not exist in our records."
        raise ApiError(404, "InvalidSourceGroupId.NotFound", told)
    policy = p.text("Policy", "accept").lower()
    if policy not in ("accept", "drop"):
        raise ApiError(400, "InvalidPolicy.Malformed", 'The specified parameter "Policy" is not valid.')
    priority = p.text("Priority", "1")
    if not priority.isdigit() or not 1 <= int(priority) <= 100:
        raise ApiError(400, "InvalidPriority.Malformed", "The parameter Priority is invalid.")
    return {
        "IpProtocol": protocol,
        "PortRange": ports,
        "SourceCidrIp": source,
        "SourceGroupId": source_group,
        "Policy": policy.capitalize(),
        "Priority": str(int(priority)),
        "NicType": "intranet",
        "Description": p.text("Description"),
    }


def _fits(protocol: str, ports: str) -> bool:
    if protocol not in ("TCP", "UDP"):
        return ports == "-1/-1"
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", ports)
    return bool(match) and 1 <= int(match[1]) <= int(match[2]) <= 65535 if match else False


def _is_cidr(text: str) -> bool:
    try:
        IPv4Network(text, strict=False)
    except ValueError:
        return False
    return True
