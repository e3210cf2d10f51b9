"""The API's answers about key pairs, security groups and networks, as plain dicts, into our values. Pure."""

from __future__ import annotations

from inventory.api.answer_fields import Answer, listed, needed, tags, whole
from inventory.api.values import KeyPair, Rule, SecurityGroup, Vpc, VSwitch


def key_pairs(answer: Answer) -> tuple[KeyPair, ...]:
    """DescribeKeyPairs"""
    return tuple(key_pair(each) for each in listed(answer, "KeyPairs", "KeyPair"))


def key_pair(each: Answer) -> KeyPair:
    """ImportKeyPair"""
    return KeyPair(needed(each, "KeyPairName"), each.get("KeyPairFingerPrint") or "")


def security_groups(answer: Answer) -> tuple[SecurityGroup, ...]:
    """DescribeSecurityGroups"""
    return tuple(
        SecurityGroup(
            needed(each, "SecurityGroupId"), each.get("SecurityGroupName", ""), each.get("VpcId") or "", tags(each)
        )
        for each in listed(answer, "SecurityGroups", "SecurityGroup")
    )


def rules(answer: Answer) -> tuple[Rule, ...]:
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


SOURCES = ("SourceCidrIp", "Ipv6SourceCidrIp", "SourceGroupId", "SourcePrefixListId")


def vpcs(answer: Answer) -> tuple[Vpc, ...]:
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


def vswitches(answer: Answer) -> tuple[VSwitch, ...]:
    """DescribeVSwitches"""
    return tuple(
        VSwitch(
            vswitch_id=needed(each, "VSwitchId"),
            vpc_id=needed(each, "VpcId"),
            zone_id=needed(each, "ZoneId"),
            cidr=each.get("CidrBlock", ""),
            status=needed(each, "Status"),
            free_addresses=whole(each.get("AvailableIpAddressCount")),
            name=each.get("VSwitchName", ""),
        )
        for each in listed(answer, "VSwitches", "VSwitch")
    )
