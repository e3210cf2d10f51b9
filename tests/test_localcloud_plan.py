"""The pure parts of the local cloud: records, names, commands, and reading the machine's own lists."""

import json
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from inventory.localcloud.cgroups import systemd_trees
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.disk import devices_below
from inventory.localcloud.host import nspawn_command
from inventory.localcloud.image import Recipe, bootstrap_command
from inventory.localcloud.mounts import mounts_below
from inventory.localcloud.network import nameservers_file, taken_by
from inventory.localcloud.places import Places
from inventory.localcloud.state import Record, grown, known_hosts_text, load, renewed, save
from inventory.localcloud.wheelhouse import download_command, key, wanted
from inventory.nodes import pyinfra_hosts
from inventory.settings import Settings

SUBNET = IPv4Network("10.9.8.0/27")


def test_hosts_are_numbered_by_rank_and_look_like_a_clouds():
    record = grown(Record(), 2, SUBNET)
    who = [(h.name, h.rank, h.address) for h in record.hosts]
    assert who == [("te1", 0, "10.9.8.10"), ("te2", 1, "10.9.8.11")]
    assert record.hosts[0].hostname.startswith("iZ") and record.hosts[0].hostname.endswith("Z")
    assert len(record.hosts[0].disk_serial) == 20


def test_growing_keeps_the_hosts_there_are():
    two = grown(Record(), 2, SUBNET)
    assert grown(two, 4, SUBNET).hosts[:2] == two.hosts
    assert grown(two, 1, SUBNET) == two


def test_a_new_machine_keeps_name_and_rank_and_never_gets_an_old_address():
    record = grown(Record(), 2, SUBNET)
    once = renewed(record, "te1", SUBNET, fresh_disk=False)
    twice = renewed(once, "te1", SUBNET, fresh_disk=True)
    old, first, second = (r.host("te1") for r in (record, once, twice))
    assert (first.name, first.rank, first.disk_id) == (old.name, old.rank, old.disk_id)
    assert first.hostname != old.hostname
    assert second.disk_id != old.disk_id
    assert len({h.address for h in (*record.hosts, *once.hosts, *twice.hosts)}) == 4


def test_a_full_subnet_says_so():
    with pytest.raises(LocalCloudError, match="no address left"):
        grown(Record(), 22, SUBNET)
    assert grown(Record(), 21, SUBNET).hosts[-1].address == "10.9.8.30"


def test_an_unknown_host_lists_the_known_ones():
    with pytest.raises(LocalCloudError, match="'te9'; there is: te1, te2"):
        grown(Record(), 2, SUBNET).host("te9")


def test_the_record_survives_a_round_trip_and_damage_is_named(tmp_path):
    record = grown(Record(), 2, SUBNET)
    save(tmp_path / "hosts.json", record)
    assert load(tmp_path / "hosts.json") == record
    (tmp_path / "hosts.json").write_text('{"hosts": [')
    with pytest.raises(LocalCloudError, match=r"damaged.*fab local\.down"):
        load(tmp_path / "hosts.json")
    assert load(tmp_path / "none.json") is None


def test_interface_names_fit_the_kernels_15_bytes():
    places = Places("abcdefgh", Path("/x"))
    assert len(places.link("te16")) == 15
    assert len(places.bridge) <= 15


def test_two_clouds_share_no_name():
    one, other = Places("a", Path("/x/a")), Places("ate1", Path("/x/ate1"))
    assert one.link("te1") != other.link("te1")
    assert not other.group("te1").startswith(one.group_prefix)


def test_known_hosts_has_a_line_for_every_key_without_comments():
    text = known_hosts_text([("10.9.8.10", "ssh-ed25519 AAAA root@x\nssh-rsa BBBB root@x\n")])
    assert text == "10.9.8.10 ssh-ed25519 AAAA\n10.9.8.10 ssh-rsa BBBB\n"


def test_mounts_below_a_folder_are_deepest_first_and_unescaped():
    lines = ["1 0 8:1 / / rw - ext4 d rw", "2 1 0:1 / /s/cc rw - overlay o rw"]
    lines += [r"3 1 0:1 / /s/cc/a\040b rw - overlay o rw", "4 1 0:1 / /s/ccc rw - overlay o rw"]
    assert mounts_below("\n".join(lines), Path("/s/cc")) == [Path("/s/cc/a b"), Path("/s/cc")]


def test_only_loop_devices_of_our_folder_count_deleted_files_too():
    listing = json.dumps(
        {
            "loopdevices": [
                {"name": "/dev/loop0", "back-file": "/s/cc/hosts/te1/disk.img (deleted)"},
                {"name": "/dev/loop1", "back-file": "/s/ccc/hosts/te1/disk.img"},
                {"name": "/dev/loop2", "back-file": None},
            ]
        }
    )
    assert devices_below(listing, Path("/s/cc")) == {Path("/s/cc/hosts/te1/disk.img"): "/dev/loop0"}
    assert devices_below("", Path("/s/cc")) == {}


def test_the_trees_systemd_works_in_are_found_on_both_layouts():
    unified = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    hybrid = (
        "30 1 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "31 1 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
        "32 1 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    )
    assert systemd_trees(unified) == (Path("/sys/fs/cgroup"),)
    assert systemd_trees(hybrid) == (Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"))


def test_an_overlapping_network_is_named_and_our_own_is_not():
    routes = [{"dst": "default", "dev": "eth0"}, {"dst": "10.9.0.0/16", "dev": "tun0"}]
    assert taken_by(routes, SUBNET, "spt-cc") == "tun0"
    assert taken_by([{"dst": "10.9.8.0/27", "dev": "spt-cc"}], SUBNET, "spt-cc") is None
    assert taken_by([{"dst": "10.9.9.4", "dev": "eth0"}], SUBNET, "spt-cc") is None


def test_loopback_name_servers_are_not_given_to_hosts():
    assert nameservers_file("nameserver 127.0.0.53\n") == Path("/run/systemd/resolve/resolv.conf")
    assert nameservers_file("# x\nnameserver 192.0.2.1\n") == Path("/etc/resolv.conf")
    assert nameservers_file("") == Path("/etc/resolv.conf")


def test_the_image_is_keyed_by_what_it_holds():
    keys = {
        Recipe().key(),
        Recipe(packages=("sudo",)).key(),
        Recipe(mirror="https://x/debian").key(),
        Recipe(certificates=("pem",)).key(),
    }
    assert len(keys) == 4
    assert Recipe().key() == Recipe().key()


def test_a_mirror_replaces_all_three_sources():
    words = bootstrap_command(Recipe(mirror="https://m.example/debian"), Path("/t"))
    sources = [word for word in words if word.startswith("deb ")]
    assert len(sources) == 3
    assert all("https://m.example/debian" in source for source in sources)
    assert not any(word.startswith("deb ") for word in bootstrap_command(Recipe(), Path("/t")))


def test_hosts_boot_on_their_own_bridge_and_root(tmp_path):
    places = Places("cc", tmp_path)
    words = nspawn_command(places, grown(Record(), 1, SUBNET).hosts[0])
    assert f"--directory={tmp_path}/hosts/te1/root" in words
    assert "--network-bridge=spt-cc" in words


def test_wheels_are_for_the_hosts_python_not_for_ours():
    text = "a==1 ; python_full_version < '3.12'\na==2 ; python_full_version >= '3.12'\nb==3  # why\n\n"
    assert wanted(text, "3.11") == ("a==1", "b==3")
    assert wanted(text, "3.12") == ("a==2", "b==3")
    assert "--python-version=3.12" in download_command(Path("/t"), "3.12", "b==3")
    assert key(text, "3.11") != key(text, "3.12")


def test_local_hosts_reach_pyinfra_in_the_same_shape_as_others(tmp_path, monkeypatch):
    from inventory.localcloud.cloud import local_nodes

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    places = Places.of("cc")
    places.folder.mkdir(parents=True)
    save(places.record, grown(Record(), 2, SUBNET))
    settings = Settings(name="cc")
    nodes = local_nodes(settings)
    (name, data), _ = pyinfra_hosts(settings, nodes)
    assert (name, data["ssh_hostname"], data["ssh_user"]) == ("te1", "10.9.8.10", "root")
    assert data["ssh_known_hosts_file"] == str(places.known_hosts)
    assert [n.gpus for n in nodes] == [0, 0]
