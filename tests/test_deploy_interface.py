import json

import pytest

from deploy.interface import InterfaceError, choose_interface, nccl_conf


def addresses(**links):
    return json.dumps([{"ifname": name, "addr_info": [{"local": at}]} for name, at in links.items()])


def route(dev):
    return json.dumps([{"dst": "10.0.0.1", "dev": dev}])


def test_the_interface_is_the_one_the_route_to_the_head_leaves_by():
    chosen = choose_interface(addresses(lo="127.0.0.1", eth1="10.0.0.2"), route("eth1"), "10.0.0.2", "10.0.0.1")
    assert chosen.name == "eth1"
    assert "10.0.0.1" in chosen.reason


def test_the_head_takes_the_interface_that_holds_its_address_although_the_route_is_loopback():
    chosen = choose_interface(addresses(lo="127.0.0.1", eth0="10.0.0.1"), route("lo"), "10.0.0.1", "10.0.0.1")
    assert chosen.name == "eth0"


def test_a_route_that_leaves_elsewhere_is_refused_with_both_names():
    with pytest.raises(InterfaceError, match=r"leaves by docker0, but 10\.0\.0\.2 is on eth1"):
        choose_interface(addresses(eth1="10.0.0.2"), route("docker0"), "10.0.0.2", "10.0.0.1")


def test_no_route_to_the_head_is_said_in_those_words():
    with pytest.raises(InterfaceError, match=r"no route from 10\.0\.0\.2 on eth1 to the head 10\.0\.0\.1"):
        choose_interface(addresses(eth1="10.0.0.2"), "[]", "10.0.0.2", "10.0.0.1")


def test_a_private_address_nobody_has_is_refused_with_what_there_is():
    with pytest.raises(InterfaceError, match=r"10\.0\.0\.7.*10\.0\.0\.2 on eth1"):
        choose_interface(addresses(eth1="10.0.0.2"), route("eth1"), "10.0.0.7", "10.0.0.1")


def test_nccl_is_told_the_exact_name_not_a_prefix():
    chosen = choose_interface(addresses(eth1="10.0.0.2"), route("eth1"), "10.0.0.2", "10.0.0.1")
    assert "NCCL_SOCKET_IFNAME==eth1" in nccl_conf(chosen).splitlines()
    assert nccl_conf(chosen).startswith("# the route to the head")
