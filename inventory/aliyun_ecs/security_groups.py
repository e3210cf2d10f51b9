"""Security groups and their rules. One action of the API a method, beside what it sends and hears."""

from __future__ import annotations

import uuid

from inventory.aliyun_ecs.answer_fields import Answer, listed, needed, tags
from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.request_fields import Fields, tag_list
from inventory.cloud.errors import CloudError
from inventory.cloud.values import Rule, SecurityGroup, Tags

SOURCES = ("SourceCidrIp", "Ipv6SourceCidrIp", "SourceGroupId", "SourcePrefixListId")


class SecurityGroups(Caller):
    """What lets you, and nobody else, reach the machines of one region."""

    def security_groups(self, *, tags: Tags | None = None, vpc_id: str = "") -> tuple[SecurityGroup, ...]:
        fields = {"RegionId": self.region_id}
        if vpc_id:
            fields["VpcId"] = vpc_id
        pages = self.pages("DescribeSecurityGroups", {**fields, "Tag": tag_list(tags)})
        return tuple(each for page in pages for each in security_groups_in(page))

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
        pages = self.pages("DescribeSecurityGroupAttribute", fields)
        return tuple(rule for page in pages for rule in rules_in(page))

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


def permission_fields(rule: Rule) -> Fields:
    """One of Permissions.N in AuthorizeSecurityGroup and RevokeSecurityGroup."""
    if rule.source.startswith("sg-"):
        source = {"SourceGroupId": rule.source}
    elif ":" in rule.source:
        source = {"Ipv6SourceCidrIp": rule.source}
    else:
        source = {"SourceCidrIp": rule.source}
    fields = {
        "IpProtocol": rule.protocol.upper(),
        "PortRange": rule.ports,
        "Policy": "accept",
        "Priority": "1",
        **source,
    }
    return fields | ({"Description": rule.description} if rule.description else {})


def security_groups_in(answer: Answer) -> tuple[SecurityGroup, ...]:
    """DescribeSecurityGroups"""
    return tuple(
        SecurityGroup(
            needed(each, "SecurityGroupId"), each.get("SecurityGroupName", ""), each.get("VpcId") or "", tags(each)
        )
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
