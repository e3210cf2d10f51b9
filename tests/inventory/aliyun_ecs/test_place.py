"""The place of machines: which network, and the rules that let you in."""

import pytest

from inventory.aliyun_ecs import place
from inventory.aliyun_ecs.network import Rule, Vpc
from inventory.cloud.errors import RentError

OURS = Rule("tcp", "22/22", "203.0.113.7/32", "r-1", place.DESCRIPTION)


def test_ssh_is_opened_from_here_and_closed_to_where_we_were():
    changes = place.rule_changes([OURS], ["198.51.100.4"])
    assert [(r.source, r.ports, r.protocol) for r in changes.add] == [("198.51.100.4/32", "22/22", "tcp")]
    assert changes.revoke == (OURS,)


def test_a_right_rule_is_left_as_it_is_however_it_is_spelt():
    bare = Rule("TCP", "22/22", "203.0.113.7", "r-1", place.DESCRIPTION)
    assert place.rule_changes([bare], ["203.0.113.7/32"]) == place.RuleChanges((), (), ())


def test_a_rule_of_somebody_else_is_said_and_stays():
    foreign = Rule("tcp", "6006/6006", "0.0.0.0/0", "r-9")
    changes = place.rule_changes([OURS, foreign], ["203.0.113.7"])
    assert (changes.foreign, changes.revoke, changes.add) == ((foreign,), (), ())


def test_a_new_switch_gets_the_first_free_network():
    assert place.free_network("172.16.0.0/12", []) == "172.16.0.0/20"
    assert place.free_network("172.16.0.0/12", ["172.16.0.0/20", "172.16.16.0/24"]) == "172.16.32.0/20"
    with pytest.raises(RentError, match="no room"):
        place.free_network("192.168.0.0/24", ["192.168.0.0/24"])


@pytest.mark.parametrize(
    ("vpc", "taken", "free"),
    [
        ("10.0.0.0/20", [], "10.0.0.0/22"),  # other zones get their own
        ("10.0.0.0/24", ["10.0.0.0/25", "192.168.0.0/24"], "10.0.0.128/26"),
        ("10.0.0.0/24", ["10.0.0.0/25", "10.0.0.128/26", "10.0.0.192/27"], "10.0.0.224/27"),
        ("172.16.0.0/19", ["172.16.0.0/20", "172.16.16.0/24"], "172.16.24.0/21"),
        ("10.0.0.0/28", [], "10.0.0.0/28"),
    ],
)
def test_a_switch_is_as_small_as_what_is_left_of_the_vpc(vpc, taken, free):
    assert place.free_network(vpc, taken) == free


def test_the_vpc_is_the_settings_own_else_spotunes():
    own, other = Vpc("vpc-1", "spotune", "172.16.0.0/12", "Available"), Vpc("vpc-2", "", "10.0.0.0/8", "Available")
    assert place.chosen([other, own], "") is own
    assert place.chosen([other], "") is None
    assert place.chosen([other, own], "vpc-2") is other
    with pytest.raises(RentError, match="there is: vpc-2"):
        place.chosen([other], "vpc-9")
