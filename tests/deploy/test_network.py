"""/etc/hosts, and the interface that training talks over."""

import json

import pytest

from deploy.network import Interface, InterfaceError, choose_interface, nccl_conf, rewrite, written_by_cloud_init

FRESH = "127.0.0.1 localhost\n127.0.1.1 iZbp1abc iZbp1abc.local\n::1 ip6-localhost ip6-loopback\n"
NODES = {"te1": "10.0.0.1", "te2": "10.0.0.2"}


def lines_for(text, name):
    return [line for line in text.splitlines() if name in line.split("#")[0].split()[1:]]


def test_every_node_has_exactly_one_line_with_its_private_address():
    text = rewrite(FRESH, "te1", NODES)
    assert lines_for(text, "te1") == ["10.0.0.1 te1"]
    assert lines_for(text, "te2") == ["10.0.0.2 te2"]


def test_a_second_rewrite_changes_nothing():
    once = rewrite(FRESH, "te1", NODES)
    assert rewrite(once, "te1", NODES) == once


def test_an_address_that_changed_leaves_no_stale_line():
    text = rewrite(rewrite(FRESH, "te1", NODES), "te1", {"te1": "10.0.0.1", "te2": "10.0.9.9"})
    assert lines_for(text, "te2") == ["10.0.9.9 te2"]
    assert "10.0.0.2" not in text


def test_a_node_that_left_has_no_line():
    assert lines_for(rewrite(rewrite(FRESH, "te1", NODES), "te1", {"te1": "10.0.0.1"}), "te2") == []


def test_a_line_typed_by_hand_that_would_shadow_the_block_is_gone():
    text = rewrite("192.168.1.5 te2\n192.168.1.6 te2 files # the old one\n" + FRESH, "te1", NODES)
    assert lines_for(text, "te2") == ["10.0.0.2 te2"]
    assert "192.168.1.6 files # the old one" in text


def test_the_own_name_is_never_loopback():
    text = rewrite("127.0.0.1 localhost te1\n127.0.1.1 te1\n", "te1", NODES)
    assert text.splitlines()[0] == "127.0.0.1 localhost"
    assert "127.0.1.1" not in text


def test_what_is_not_ours_stays_as_it_was():
    text = rewrite("# by hand\n\n10.1.1.1\tnas  storage\n", "te1", NODES)
    assert text.startswith("# by hand\n\n10.1.1.1\tnas  storage\n")


def test_cloud_inits_own_header_is_recognised():
    assert written_by_cloud_init("# Your system has configured 'manage_etc_hosts' as True.\n")
    assert not written_by_cloud_init(FRESH)


def test_the_own_name_is_never_loopback_whatever_else_its_line_names():
    assert "127.0.1.1" not in rewrite("127.0.1.1 te1 te1.local\n", "te1", NODES)
    assert "127.0.1.1" not in rewrite("127.0.1.1 iZbp1abc\n", "te1", NODES)


def test_a_name_of_its_own_that_is_not_in_the_cluster_is_not_left_on_loopback_either():
    assert lines_for(rewrite("127.0.0.1 localhost te9\n", "te9", NODES), "te9") == []


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


OF_THE_IMAGE = "# topology\nNCCL_TOPO_FILE=/opt/vendor/topo.xml\nNCCL_IB_GID_INDEX=3\nNCCL_SOCKET_IFNAME=ib0\n"


def test_nccl_takes_the_exact_interface_first_and_what_the_image_says_stays():
    chosen = choose_interface(addresses(eth1="10.0.0.2"), route("eth1"), "10.0.0.2", "10.0.0.1")
    once = nccl_conf(OF_THE_IMAGE, chosen)
    names = [line for line in once.splitlines() if line.startswith("NCCL_SOCKET_IFNAME")]
    assert names == ["NCCL_SOCKET_IFNAME==eth1", "NCCL_SOCKET_IFNAME=ib0"]
    assert once.endswith(f"\n{OF_THE_IMAGE}") and chosen.reason in once
    assert nccl_conf(once, chosen) == once
    assert "eth1" not in nccl_conf(once, Interface("eth2", "moved"))
