"""Key pairs, security groups and networks. Thin: one action of the API a method."""

from __future__ import annotations

import json
import uuid

from inventory.api import access_answers as answers
from inventory.api import requests
from inventory.api.caller import VPC, Caller
from inventory.api.errors import CloudError, Kind
from inventory.api.values import KeyPair, Rule, SecurityGroup, Tags, Vpc, VSwitch

TAKEN = ("KeyPair.AlreadyExist", "InvalidKeyPairName.Duplicate")


class AccessCalls(Caller):
    """What lets you, and nobody else, reach the machines of one region."""

    def key_pairs(self, name: str = "", *, tags: Tags | None = None) -> tuple[KeyPair, ...]:
        """The key pair with this name, if there is one; without a name all that have these tags."""
        wanted = {"KeyPairName": name, "Tag": requests.tags(tags)}
        fields = {"RegionId": self.region_id, **{key: value for key, value in wanted.items() if value}}
        pages = self.numbered_pages("DescribeKeyPairs", fields)
        return tuple(each for page in pages for each in answers.key_pairs(page) if name in ("", each.name))

    def import_key_pair(self, name: str, public_key: str, tags: Tags | None) -> KeyPair:
        """Bring a public key. A pair of this name is returned as it is: name it by its key."""
        fields = {"RegionId": self.region_id, "KeyPairName": name, "PublicKeyBody": public_key}
        try:
            return answers.key_pair(self.call("ImportKeyPair", {**fields, "Tag": requests.tags(tags)}))
        except CloudError as error:
            # The action has no ClientToken: this is also what a repetition after a lost answer says.
            known = self.key_pairs(name) if error.code.startswith(TAKEN) else ()
            if not known:
                raise
            return known[0]

    def delete_key_pair(self, name: str) -> None:
        """Delete a key pair. One that is gone already is no error."""
        try:
            self.call("DeleteKeyPairs", {"RegionId": self.region_id, "KeyPairNames": json.dumps([name])})
        except CloudError as error:
            if error.kind is not Kind.NOT_FOUND:
                raise

    def security_groups(self, *, tags: Tags | None = None, vpc_id: str = "") -> tuple[SecurityGroup, ...]:
        """The security groups with all these tags in this network."""
        fields = {"RegionId": self.region_id}
        if vpc_id:
            fields["VpcId"] = vpc_id
        pages = self.pages("DescribeSecurityGroups", {**fields, "Tag": requests.tags(tags)})
        return tuple(each for page in pages for each in answers.security_groups(page))

    def create_security_group(self, vpc_id: str, name: str, tags: Tags | None, token: str) -> str:
        """A new group's id. Its machines reach each other; nothing else gets in."""
        fields = {
            "RegionId": self.region_id,
            "VpcId": vpc_id,
            "SecurityGroupName": name,
            "SecurityGroupType": "normal",
            "Tag": requests.tags(tags),
            "ClientToken": token,
        }
        return str(self.call("CreateSecurityGroup", fields)["SecurityGroupId"])

    def rules(self, security_group_id: str) -> tuple[Rule, ...]:
        """What the group lets in."""
        fields = {"RegionId": self.region_id, "SecurityGroupId": security_group_id, "Direction": "ingress"}
        pages = self.pages("DescribeSecurityGroupAttribute", fields)
        return tuple(rule for page in pages for rule in answers.rules(page))

    def allow(self, security_group_id: str, rule: Rule) -> None:
        """Let something in; what is let in already is no error."""
        try:
            self.call("AuthorizeSecurityGroup", self._permission(security_group_id, rule))
        except CloudError as error:
            if ".Duplicate" not in error.code:
                raise

    def revoke(self, security_group_id: str, rule: Rule) -> None:
        """Take a rule away; one that is gone already is no error."""
        fields = self._permission(security_group_id, rule)
        if rule.rule_id:
            del fields["Permissions"]
            fields["SecurityGroupRuleId"] = [rule.rule_id]
        try:
            self.call("RevokeSecurityGroup", fields)
        except CloudError as error:
            if error.kind is not Kind.NOT_FOUND:
                raise

    def _permission(self, security_group_id: str, rule: Rule) -> requests.Fields:
        return {
            "RegionId": self.region_id,
            "SecurityGroupId": security_group_id,
            "ClientToken": uuid.uuid4().hex,
            "Permissions": [requests.permission(rule)],
        }

    def vpcs(self) -> tuple[Vpc, ...]:
        """The region's private networks."""
        pages = self.numbered_pages("DescribeVpcs", {"RegionId": self.region_id}, VPC)
        return tuple(each for page in pages for each in answers.vpcs(page))

    def create_vpc(self, name: str, cidr: str, token: str) -> str:
        """A new network's id; it can be used once it is Available."""
        fields = {"RegionId": self.region_id, "VpcName": name, "CidrBlock": cidr, "ClientToken": token}
        return str(self.call("CreateVpc", fields, VPC)["VpcId"])

    def vswitches(self, vpc_id: str) -> tuple[VSwitch, ...]:
        """The subnets of a network."""
        fields = {"RegionId": self.region_id, "VpcId": vpc_id}
        pages = self.numbered_pages("DescribeVSwitches", fields, VPC)
        return tuple(each for page in pages for each in answers.vswitches(page))

    def create_vswitch(self, vpc_id: str, zone_id: str, cidr: str, name: str, token: str) -> str:
        """A new subnet's id; it can be used once it is Available."""
        fields = {"RegionId": self.region_id, "VpcId": vpc_id, "ZoneId": zone_id, "CidrBlock": cidr}
        return str(self.call("CreateVSwitch", {**fields, "VSwitchName": name, "ClientToken": token}, VPC)["VSwitchId"])
