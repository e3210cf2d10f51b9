"""The pure parts of the local cloud: names, commands, and reading the machine's own lists."""

import json
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from inventory.localcloud.commands import MOUNTINFO, made_once, mounts_below, run
from inventory.localcloud.disk import devices_below
from inventory.localcloud.host import LocalHost, nspawn_command
from inventory.localcloud.image import ImageRecipe, bootstrap_command, download_command, key, wanted
from inventory.localcloud.inside import systemd_trees
from inventory.localcloud.network import nameservers_file, taken_by
from inventory.localcloud.places import Places

SUBNET = IPv4Network("10.9.8.0/27")


def test_interface_names_fit_the_kernels_15_bytes():
    places = Places("abcdefgh", Path("/x"))
    assert len(places.link("m999")) == 15
    assert len(places.bridge) <= 15


def test_two_clouds_share_no_name():
    one, other = Places("a", Path("/x/a")), Places("am1", Path("/x/am1"))
    assert one.link("m1") != other.link("m1")
    assert not other.group("m1").startswith(one.group_prefix)


@pytest.mark.localcloud
def test_what_an_interrupted_maker_left_mounted_is_unmounted_before_it_is_removed(tmp_path: Path):
    left, kept = tmp_path / ".building-left", tmp_path / "kept"
    for folder in (left / "dev" / "pts", kept):
        folder.mkdir(parents=True)
    (kept / "of the machine").write_text("kept")
    run("mount", "-t", "tmpfs", "none", left / "dev")
    (left / "dev" / "pts").mkdir()
    run("mount", "--bind", kept, left / "dev" / "pts")

    def interrupted(half: Path) -> None:
        run("mount", "-t", "tmpfs", "none", half)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once(tmp_path / "image", interrupted)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "kept"]
    assert (kept / "of the machine").read_text() == "kept"
    assert made_once(tmp_path / "image", lambda half: (half / "file").touch()) == tmp_path / "image"
    assert mounts_below(MOUNTINFO.read_text(), tmp_path) == []


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
        ImageRecipe().key(),
        ImageRecipe(packages=("sudo",)).key(),
        ImageRecipe(mirror="https://x/debian").key(),
        ImageRecipe(certificates=("pem",)).key(),
    }
    assert len(keys) == 4
    assert ImageRecipe().key() == ImageRecipe().key()


def test_a_mirror_replaces_all_three_sources():
    words = bootstrap_command(ImageRecipe(mirror="https://m.example/debian"), Path("/t"))
    sources = [word for word in words if word.startswith("deb ")]
    assert len(sources) == 3
    assert all("https://m.example/debian" in source for source in sources)
    assert not any(word.startswith("deb ") for word in bootstrap_command(ImageRecipe(), Path("/t")))


def test_hosts_boot_on_their_own_bridge_and_root(tmp_path):
    places = Places("cc", tmp_path)
    words = nspawn_command(places, LocalHost("m1", "iZx", "10.9.8.10"))
    assert f"--directory={tmp_path}/hosts/m1/root" in words
    assert "--network-bridge=spt-cc" in words


def test_wheels_are_for_the_hosts_python_not_for_ours():
    text = "a==1 ; python_full_version < '3.12'\na==2 ; python_full_version >= '3.12'\nb==3  # why\n\n"
    assert wanted(text, "3.11") == ("a==1", "b==3")
    assert wanted(text, "3.12") == ("a==2", "b==3")
    assert "--python-version=3.12" in download_command(Path("/t"), "3.12", "b==3")
    assert key(text, "3.11") != key(text, "3.12")
