"""The network machines are put into: one VPC, and a switch in each zone where there are machines. Free of charge."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network
from typing import TYPE_CHECKING

from inventory.cloud.errors import RentError
from inventory.renting.intents import Intents

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.cloud.values import Subnet, Vpc
    from inventory.settings import Settings

NAME = "spotune"
CIDR = "172.16.0.0/12"
SWITCH_PREFIX = 20
READY_S = 60.0


def free_network(cidr: str, taken: Sequence[str], key: str) -> str:
    """The first network in `cidr` of a switch's size that overlaps none of those taken. Pure; raises RentError, which
    names the setting `key`."""
    whole = IPv4Network(cidr)
    used = [IPv4Network(each) for each in taken]
    for candidate in whole.subnets(new_prefix=max(SWITCH_PREFIX, whole.prefixlen)):
        if not any(candidate.overlaps(each) for each in used):
            return str(candidate)
    raise RentError(f"{key}: no room for a vSwitch is left in {cidr}; name another VPC")


def chosen(vpcs: Sequence[Vpc], wanted: str, key: str) -> Vpc | None:
    """The configured VPC, else spotune's own; None where that is still to make. Pure; raises RentError."""
    if not wanted:
        return next((vpc for vpc in vpcs if vpc.name == NAME), None)
    for vpc in vpcs:
        if wanted in (vpc.vpc_id, vpc.name):
            return vpc
    there = ", ".join(vpc.vpc_id for vpc in vpcs) or "none"
    raise RentError(f"{key}: there is no VPC {wanted!r} in the region; there is: {there}")


def ensure_vpc(cloud: Cloud, settings: Settings, intents: Intents) -> Vpc:
    """The VPC, made where it is spotune's own and not there yet."""
    vpc = chosen(cloud.vpcs(), settings.rental.vpc, settings.rental.key("vpc"))
    if vpc is not None:
        intents.forget("vpc")  # of a call that was cut off
    if vpc is not None and vpc.status == "Available":
        return vpc
    if vpc is None:
        with intents.begun("vpc", [cloud.region_id, NAME, CIDR]) as token:
            vpc_id = cloud.create_vpc(NAME, CIDR, token)
    else:
        vpc_id = vpc.vpc_id
    return _ready(cloud, vpc_id)


def _ready(cloud: Cloud, vpc_id: str) -> Vpc:
    def look() -> Vpc | None:
        return next((v for v in cloud.vpcs() if v.vpc_id == vpc_id and v.status == "Available"), None)

    return cloud.pace.until(look, f"the VPC {vpc_id} is not Available", cloud.pace.limit_s(READY_S))


def ensure_subnet(cloud: Cloud, settings: Settings, vpc: Vpc, zone_id: str, intents: Intents) -> str:
    """A switch of the VPC in a zone, the one with most room; made where there is none."""
    switches = cloud.subnets(vpc.vpc_id)
    own = [s for s in switches if s.zone_id == zone_id]
    key = f"vswitch {zone_id}"
    if own:
        intents.forget(key)  # of a call that was cut off
        switch = max(own, key=lambda s: (s.status == "Available", s.free_addresses, s.subnet_id))
        if switch.status == "Available":
            return switch.subnet_id
        switch_id = switch.subnet_id
    else:
        cidr = free_network(vpc.cidr, [s.cidr for s in switches], settings.rental.key("vpc"))
        with intents.begun(key, [vpc.vpc_id, zone_id, cidr]) as token:
            switch_id = cloud.create_subnet(vpc.vpc_id, zone_id, cidr, f"{NAME}-{zone_id}", token)
    return _switch_ready(cloud, vpc.vpc_id, switch_id).subnet_id


def _switch_ready(cloud: Cloud, vpc_id: str, switch_id: str) -> Subnet:
    def look() -> Subnet | None:
        there = cloud.subnets(vpc_id)
        return next((s for s in there if s.subnet_id == switch_id and s.status == "Available"), None)

    return cloud.pace.until(look, f"the vSwitch {switch_id} is not Available", cloud.pace.limit_s(READY_S))
