"""Private networks and their subnets. One action of the API a method, beside what it hears."""

from __future__ import annotations

from inventory.aliyun_ecs.answer_fields import Answer, listed, needed, whole
from inventory.aliyun_ecs.caller import VPC, Caller
from inventory.cloud.values import Subnet, Vpc


class Networks(Caller):
    """Networks of one region."""

    def vpcs(self) -> tuple[Vpc, ...]:
        pages = self.numbered_pages("DescribeVpcs", {"RegionId": self.region_id}, VPC)
        return tuple(each for page in pages for each in vpcs_in(page))

    def create_vpc(self, name: str, cidr: str, token: str) -> str:
        fields = {"RegionId": self.region_id, "VpcName": name, "CidrBlock": cidr, "ClientToken": token}
        return str(self.call("CreateVpc", fields, VPC)["VpcId"])

    def subnets(self, vpc_id: str) -> tuple[Subnet, ...]:
        fields = {"RegionId": self.region_id, "VpcId": vpc_id}
        pages = self.numbered_pages("DescribeVSwitches", fields, VPC)
        return tuple(each for page in pages for each in subnets_in(page))

    def create_subnet(self, vpc_id: str, zone_id: str, cidr: str, name: str, token: str) -> str:
        fields = {"RegionId": self.region_id, "VpcId": vpc_id, "ZoneId": zone_id, "CidrBlock": cidr}
        return str(self.call("CreateVSwitch", {**fields, "VSwitchName": name, "ClientToken": token}, VPC)["VSwitchId"])


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
            name=each.get("VSwitchName", ""),
        )
        for each in listed(answer, "VSwitches", "VSwitch")
    )
