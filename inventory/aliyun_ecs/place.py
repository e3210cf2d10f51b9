"""What machines are put into, and who reaches them: one VPC, a vSwitch in each zone where there are machines, the key
pair, and a security group that lets in ssh from here and the machines among themselves. All of it is free of charge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import TypeVar

from inventory.aliyun_ecs.machines import Machines
from inventory.aliyun_ecs.network import Networks, Rule, Subnet, Vpc
from inventory.cloud.errors import RentError
from inventory.cloud.port import Journal
from inventory.cloud.values import NetworkRequest, PreparedNetwork

Made = TypeVar("Made", Vpc, Subnet)
NAME = "spotune"
CIDR = "172.16.0.0/12"
SWITCH_PREFIX, SMALLEST_PREFIX = 20, 28
READY_S = 60.0
SSH = "22/22"
DESCRIPTION = "spotune ssh"
"""Marks the rules that are ours to take back."""
KEY = "aliyun.vpc"
"""The setting that names a VPC."""


class PreparedPlaces(Networks, Machines):
    """The place of a cluster's machines in one region."""

    ready: dict[tuple[object, ...], tuple[Vpc, str]]
    """VPC and security group of what was asked for before, in whichever zone."""

    def prepare_network(self, wanted: NetworkRequest, journal: Journal) -> PreparedNetwork:
        """What the port asks for. Raises CloudError; RentError where the VPC that the settings name is not there."""
        if not wanted.key_pair:
            groups = self.security_groups(tags=wanted.tags)
            notes = [note for each in groups for note in self._open(each.security_group_id, wanted.ssh_from)]
            return PreparedNetwork(notes=tuple(notes))
        anywhere, notes = (wanted.cluster, wanted.network, wanted.ssh_from, wanted.key_pair), list[str]()
        if anywhere not in self.ready:
            vpc = self._vpc(wanted, journal)
            group = self._group(wanted, vpc, journal)
            notes += self._open(group, wanted.ssh_from)
            if not self.key_pair(wanted.key_pair):
                self.import_key_pair(wanted.key_pair, wanted.public_key, wanted.tags)
            self.ready[anywhere] = vpc, group
        vpc, group = self.ready[anywhere]
        subnet = self._subnet(vpc, wanted.zone_id, journal) if wanted.zone_id else ""
        return PreparedNetwork(group, subnet, tuple(notes))

    def _vpc(self, wanted: NetworkRequest, journal: Journal) -> Vpc:
        """The VPC, made where it is spotune's own and not there yet."""
        vpc = chosen(self.vpcs(), wanted.network)
        if vpc is None:
            with journal.begun("vpc", [self.region_id, NAME, CIDR]) as token:
                vpc_id = self.create_vpc(NAME, CIDR, token)
        else:
            journal.forget("vpc")  # of a call that was cut off
            vpc_id = vpc.vpc_id
            if vpc.status == "Available":
                return vpc
        return self._until_available(self.vpcs, lambda vpc: vpc.vpc_id == vpc_id, f"the VPC {vpc_id}")

    def _until_available(self, look: Callable[[], Sequence[Made]], is_it: Callable[[Made], bool], what: str) -> Made:
        def found() -> Made | None:
            return next((each for each in look() if is_it(each) and each.status == "Available"), None)

        return self.pace.until(found, f"{what} is not Available", self.pace.limit_s(READY_S))

    def _subnet(self, vpc: Vpc, zone_id: str, journal: Journal) -> str:
        """A vSwitch of the VPC in a zone, the one with most room; made where there is none."""
        switches = self.subnets(vpc.vpc_id)
        own = [each for each in switches if each.zone_id == zone_id]
        key = f"vswitch {zone_id}"
        if own:
            journal.forget(key)  # of a call that was cut off
            switch = max(own, key=lambda each: (each.status == "Available", each.free_addresses, each.subnet_id))
            if switch.status == "Available":
                return switch.subnet_id
            switch_id = switch.subnet_id
        else:
            cidr = free_network(vpc.cidr, [each.cidr for each in switches])
            with journal.begun(key, [vpc.vpc_id, zone_id, cidr]) as token:
                switch_id = self.create_subnet(vpc.vpc_id, zone_id, cidr, f"{NAME}-{zone_id}", token)
        is_it, what = (lambda each: each.subnet_id == switch_id), f"the vSwitch {switch_id}"
        return self._until_available(lambda: self.subnets(vpc.vpc_id), is_it, what).subnet_id

    def _group(self, wanted: NetworkRequest, vpc: Vpc, journal: Journal) -> str:
        """The cluster's security group in a VPC; made where there is none."""
        groups = self.security_groups(tags=wanted.tags, vpc_id=vpc.vpc_id)
        key = f"security group {vpc.vpc_id}"
        if groups:
            journal.forget(key)  # of a call that was cut off
            return min(group.security_group_id for group in groups)
        name = f"{NAME}-{wanted.cluster}"
        with journal.begun(key, [vpc.vpc_id, name]) as token:
            return self.create_security_group(vpc.vpc_id, name, wanted.tags, token)

    def _open(self, group_id: str, ssh_from: Sequence[str]) -> list[str]:
        """Bring a group's rules to what they should be; what was done and found, a sentence each."""
        changes, notes = rule_changes(self.rules(group_id), ssh_from), list[str]()
        for rule in changes.add:
            self.allow(group_id, rule)
            notes.append(f"ssh is open to {rule.source}")
        for rule in changes.revoke:
            self.revoke(group_id, rule)
            notes.append(f"ssh is no longer open to {rule.source}")
        for rule in changes.foreign:
            opened = f"{rule.protocol} {rule.ports} from {rule.source}"
            notes.append(f"{group_id} also lets in {opened}; that rule is not ours")
        return notes


def free_network(cidr: str, taken: Sequence[str]) -> str:
    """The first network in `cidr` of a vSwitch's size, else of a smaller one, that overlaps none of those taken. Pure;
    raises RentError."""
    whole = IPv4Network(cidr)
    used = [IPv4Network(each) for each in taken]
    # A small VPC is not given to one zone whole; what is left between other switches may be smaller still.
    for prefix in range(max(SWITCH_PREFIX, min(whole.prefixlen + 2, SMALLEST_PREFIX)), SMALLEST_PREFIX + 1):
        for candidate in whole.subnets(new_prefix=max(prefix, whole.prefixlen)):
            if not any(candidate.overlaps(each) for each in used):
                return str(candidate)
    raise RentError(f"{KEY}: no room for a vSwitch is left in {cidr}; name another VPC")


def chosen(vpcs: Sequence[Vpc], wanted: str) -> Vpc | None:
    """The configured VPC, else spotune's own; None where that is still to make. Pure; raises RentError."""
    if not wanted:
        return next((vpc for vpc in vpcs if vpc.name == NAME), None)
    for vpc in vpcs:
        if wanted in (vpc.vpc_id, vpc.name):
            return vpc
    ids = ", ".join(vpc.vpc_id for vpc in vpcs) or "none"
    raise RentError(f"{KEY}: there is no VPC {wanted!r} in the region; there is: {ids}")


@dataclass(frozen=True)
class RuleChanges:
    """How a group's rules differ from what they should be."""

    add: tuple[Rule, ...]
    revoke: tuple[Rule, ...]
    foreign: tuple[Rule, ...]
    """Made by somebody else: they stay, and are said."""


def rule_changes(rules: Sequence[Rule], ssh_from: Sequence[str]) -> RuleChanges:
    """ssh from exactly these networks; addresses that are no longer ours are taken back. Pure.

    Nothing is said of the group's own machines: those of a normal group reach each other by default.
    """
    wanted = sorted({_cidr(each) for each in ssh_from})
    allowed = {_cidr(each.source) for each in rules if _is_ssh(each)}
    ours = [each for each in rules if each.description == DESCRIPTION]
    right = [each for each in rules if _is_ssh(each) and _cidr(each.source) in wanted]
    return RuleChanges(
        add=tuple(Rule("tcp", SSH, cidr, description=DESCRIPTION) for cidr in wanted if cidr not in allowed),
        revoke=tuple(each for each in ours if each not in right),
        foreign=tuple(each for each in rules if each not in ours and each not in right),
    )


def _is_ssh(rule: Rule) -> bool:
    return rule.protocol.lower() == "tcp" and rule.ports == SSH


def _cidr(source: str) -> str:
    try:
        return str(IPv4Network(source, strict=False))
    except ValueError:
        return source
