"""Private networks, their subnets, security groups and their rules. One action of the API a method, beside what it
sends and hears."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from inventory.aliyun_ecs.caller import VPC, Caller
from inventory.aliyun_ecs.fields import Answer, Fields, given, listed, needed, tag_list, tags, whole
from inventory.cloud.errors import CloudError
from inventory.cloud.values import Tags

SOURCES = ("SourceCidrIp", "Ipv6SourceCidrIp", "SourceGroupId", "SourcePrefixListId")


@dataclass(frozen=True)
class SecurityGroup:
    security_group_id: str
    vpc_id: str
    tags: Tags = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """An ingress rule of a security group."""

    protocol: str
    """tcp, udp, icmp or all"""
    ports: str
    """As 22/22; -1/-1 for all."""
    source: str
    """CIDR"""
    rule_id: str = ""
    description: str = ""


@dataclass(frozen=True)
class Vpc:
    vpc_id: str
    name: str
    cidr: str
    status: str


@dataclass(frozen=True)
class Subnet:
    subnet_id: str
    vpc_id: str
    zone_id: str
    cidr: str
    status: str
    free_addresses: int = 0


class Networks(Caller):
    """Networks of one region, and what lets you, and nobody else, reach the machines in them."""

    def vpcs(self) -> tuple[Vpc, ...]:
        return tuple(self.numbered_pages("DescribeVpcs", {}, vpcs_in, VPC))

    def create_vpc(self, name: str, cidr: str, token: str) -> str:
        fields = {"RegionId": self.region_id, "VpcName": name, "CidrBlock": cidr, "ClientToken": token}
        return str(self.call("CreateVpc", fields, VPC)["VpcId"])

    def subnets(self, vpc_id: str) -> tuple[Subnet, ...]:
        return tuple(self.numbered_pages("DescribeVSwitches", {"VpcId": vpc_id}, subnets_in, VPC))

    def create_subnet(self, vpc_id: str, zone_id: str, cidr: str, name: str, token: str) -> str:
        fields = {"RegionId": self.region_id, "VpcId": vpc_id, "ZoneId": zone_id, "CidrBlock": cidr}
        return str(self.call("CreateVSwitch", {**fields, "VSwitchName": name, "ClientToken": token}, VPC)["VSwitchId"])

    def security_groups(self, *, tags: Tags | None = None, vpc_id: str = "") -> tuple[SecurityGroup, ...]:
        fields = {"RegionId": self.region_id, "Tag": tag_list(tags), **given(VpcId=vpc_id)}
        return tuple(self.pages("DescribeSecurityGroups", fields, security_groups_in))

    def create_security_group(self, vpc_id: str, name: str, tags: Tags | None, token: str) -> str:
        fields = {
            "RegionId": self.region_id,
            "VpcId": vpc_id,
            "SecurityGroupName": name,
            "SecurityGroupType": "normal",
            "Tag": tag_list(tags),
            "ClientToken": token,
        }
        return str(self.call("CreateSecurityGroup", fields)["SecurityGroupId"])

    def rules(self, security_group_id: str) -> tuple[Rule, ...]:
        fields = {"RegionId": self.region_id, "SecurityGroupId": security_group_id, "Direction": "ingress"}
        return tuple(self.pages("DescribeSecurityGroupAttribute", fields, rules_in))

    def allow(self, security_group_id: str, rule: Rule) -> None:
        try:
            self.call("AuthorizeSecurityGroup", self._permission(security_group_id, rule))
        except CloudError as error:
            if ".Duplicate" not in error.code:
                raise

    def revoke(self, security_group_id: str, rule: Rule) -> None:
        fields = self._permission(security_group_id, rule)
        if rule.rule_id:
            del fields["Permissions"]
            fields["SecurityGroupRuleId"] = [rule.rule_id]
        self.remove("RevokeSecurityGroup", fields)

    def _permission(self, security_group_id: str, rule: Rule) -> Fields:
        return {
            "RegionId": self.region_id,
            "SecurityGroupId": security_group_id,
            "ClientToken": uuid.uuid4().hex,
            "Permissions": [permission_fields(rule)],
        }


def vpcs_in(answer: Answer) -> tuple[Vpc, ...]:
    """DescribeVpcs"""
    return tuple(
        Vpc(
            needed(each, "VpcId"),
            each.get("VpcName", ""),
            each.get("CidrBlock", ""),
            needed(each, "Status"),
        )
        for each in listed(answer, "Vpcs", "Vpc")
    )


def subnets_in(answer: Answer) -> tuple[Subnet, ...]:
    """DescribeVSwitches"""
    return tuple(
        Subnet(
            subnet_id=needed(each, "VSwitchId"),
            vpc_id=needed(each, "VpcId"),
            zone_id=needed(each, "ZoneId"),
            cidr=each.get("CidrBlock", ""),
            status=needed(each, "Status"),
            free_addresses=whole(each.get("AvailableIpAddressCount")),
        )
        for each in listed(answer, "VSwitches", "VSwitch")
    )


def permission_fields(rule: Rule) -> Fields:
    """One of Permissions.N in AuthorizeSecurityGroup and RevokeSecurityGroup."""
    if rule.source.startswith("sg-"):
        source = {"SourceGroupId": rule.source}
    elif ":" in rule.source:
        source = {"Ipv6SourceCidrIp": rule.source}
    else:
        source = {"SourceCidrIp": rule.source}
    fields = {"IpProtocol": rule.protocol.upper(), "PortRange": rule.ports, "Policy": "accept", "Priority": "1"}
    return fields | source | given(Description=rule.description)


def security_groups_in(answer: Answer) -> tuple[SecurityGroup, ...]:
    """DescribeSecurityGroups"""
    return tuple(
        SecurityGroup(needed(each, "SecurityGroupId"), each.get("VpcId") or "", tags(each))
        for each in listed(answer, "SecurityGroups", "SecurityGroup")
    )


def rules_in(answer: Answer) -> tuple[Rule, ...]:
    """DescribeSecurityGroupAttribute: what lets traffic in."""
    return tuple(
        Rule(
            protocol=needed(each, "IpProtocol").lower(),
            ports=each.get("PortRange") or "-1/-1",
            source=next((each[key] for key in SOURCES if each.get(key)), ""),
            rule_id=each.get("SecurityGroupRuleId") or "",
            description=each.get("Description") or "",
        )
        for each in listed(answer, "Permissions", "Permission")
        if each.get("Direction", "ingress") == "ingress" and each.get("Policy", "Accept").lower() == "accept"
    )
