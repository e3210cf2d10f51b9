"""Real hosts on this machine: what a rented one would give, what can happen to it, and that nothing stays."""

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from paramiko import SSHException

from inventory import ssh
from inventory.localcloud import cgroups, cloud, host, state, wheelhouse
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.image import Recipe, ensure_image
from inventory.localcloud.places import Places
from inventory.settings import Settings, SettingsError
from tests.local_cluster import ROOT, wait_for

pytestmark = pytest.mark.localcloud

NAME = "tlc"
SETTINGS = Settings(name=NAME, local={"nodes": 2, "disk_gib": 1, "subnet": "10.213.83.0/24"})


def silent(line):
    """Progress nobody reads."""


@pytest.fixture(scope="module")
def state_home():
    folder = tempfile.mkdtemp(prefix="spt", dir="/tmp")
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = folder
    yield Path(folder)
    cloud.down(SETTINGS)
    shutil.rmtree(folder)
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture
def nodes(state_home):
    """Two running hosts, whatever the test before did to them."""
    return cloud.up(SETTINGS, 2, silent)


@pytest.fixture
def disk_folder(nodes):
    return "/dev/disk/by-id/virtio-" + nodes[0].disk_serial


def on(node, command):
    with ssh.connect(node) as connection:
        return ssh.run(connection, command).strip()


def boot_id(node):
    """The id of a host's boot; empty while it does not answer."""
    with suppress(ssh.SshError, OSError, EOFError, SSHException):
        return on(node, "cat /proc/sys/kernel/random/boot_id")
    return ""


def traces():
    """Everything on this machine that carries the cloud's name."""
    places = Places.of(NAME)
    commands = ("ps -eo args", "losetup --list", "ip link", "nft list tables")
    shown = [subprocess.check_output(command.split(), text=True) for command in commands]
    lines = "".join([*shown, Path("/proc/mounts").read_text()]).splitlines()
    marks = (str(places.folder), places.bridge, places.table, places.link(""), places.machine("te"))
    found = [line for line in lines if any(mark in line for mark in marks)]
    folders = [path for path in (places.folder, host.PROPAGATION / places.machine("te1")) if path.exists()]
    return found + list(cgroups.groups_named(places.group_prefix)) + folders


def test_a_host_answers_with_a_clouds_name_and_its_own_address(nodes):
    record = state.load(Places.of(NAME).record)
    assert [on(node, "hostname") for node in nodes] == [h.hostname for h in record.hosts]
    assert f"{nodes[1].address}/24" in on(nodes[1], "ip -brief address show host0")


def test_hosts_reach_each_other_and_packages(nodes):
    on(nodes[0], f"ping -c 1 -W 2 {nodes[1].address}")
    on(nodes[0], "apt-get update -qq && apt-get install -qq -y --download-only ninja-build")


def test_the_data_disk_is_found_by_serial_and_blank(nodes, disk_folder):
    assert on(nodes[0], f"readlink -f {disk_folder}") == "/dev/vdb"
    assert on(nodes[0], f"blockdev --getsize64 {disk_folder}") == str(1 << 30)
    assert on(nodes[0], "blkid --probe /dev/vdb; cmp -n 4194304 /dev/vdb /dev/zero && echo blank") == "blank"


def test_an_unknown_host_key_is_refused(nodes, tmp_path):
    (tmp_path / "known_hosts").write_text("")
    with pytest.raises(ssh.SshError, match=r"te1.*host key is not in"):
        ssh.connect(replace(nodes[0], known_hosts=tmp_path / "known_hosts"))


def test_another_machines_host_key_is_refused(nodes, tmp_path):
    first, second = nodes
    other = [line for line in first.known_hosts.read_text().splitlines() if line.startswith(second.address)]
    swapped = "\n".join(line.replace(second.address, first.address) for line in other)
    (tmp_path / "known_hosts").write_text(swapped + "\n")
    with pytest.raises(ssh.SshError, match=r"te1.*host key is not the one"):
        ssh.connect(replace(nodes[0], known_hosts=tmp_path / "known_hosts"))


def test_a_foreign_key_pair_is_refused(nodes, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "id"], check=True)
    with pytest.raises(ssh.SshError, match=r"refuses the key"):
        ssh.connect(replace(nodes[0], key=tmp_path / "id"))


def test_trust_shows_adds_and_replaces_the_key_of_a_listed_machine(nodes, tmp_path):
    first, second = nodes
    known = tmp_path / "known_hosts"
    file = tmp_path / "cluster.toml"
    ssh_table = f'[ssh]\nkey = "{first.key}"\nknown_hosts = "{known}"\n'
    file.write_text(f'provider = "static"\n{ssh_table}[[nodes]]\nname = "gpu"\naddress = "{first.address}"\n')

    def trust(*flags):
        return subprocess.run(
            [Path(sys.executable).with_name("fab"), "trust", *flags],
            cwd=ROOT,
            env={**os.environ, "SPOTUNE_CLUSTER": str(file)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    unanswered = trust()
    assert (unanswered.returncode, known.exists()) == (2, False)
    public = Places.of(NAME).root("te1") / "etc/ssh/ssh_host_ed25519_key.pub"
    fingerprint = subprocess.check_output(["ssh-keygen", "-lf", public], text=True).split()[1]
    assert fingerprint in trust("--yes").stdout
    assert on(replace(first, known_hosts=known), "echo in") == "in"
    before = known.read_text()
    assert trust().stdout.strip() == "gpu: known"
    assert known.read_text() == before

    other = [line for line in second.known_hosts.read_text().splitlines() if line.startswith(second.address)]
    known.write_text("".join(line.replace(second.address, first.address) + "\n" for line in other))
    assert trust().returncode == 2
    assert trust("--yes").returncode == 1
    assert "was" in trust("--fingerprint", fingerprint).stdout
    assert [line for line in before.splitlines() if "ed25519" in line] == known.read_text().splitlines()
    known.unlink()
    assert trust("--yes").returncode == 0
    assert sorted(known.read_text().splitlines()) == sorted(before.splitlines())


def test_up_again_changes_nothing(nodes):
    said = []
    before = boot_id(nodes[0])
    assert cloud.up(SETTINGS, 2, said.append) == nodes
    assert said == ["all 2 hosts are running already"]
    assert boot_id(nodes[0]) == before


def test_a_reboot_comes_back_with_disk_mount_and_files(nodes):
    boot = boot_id(nodes[1])
    on(nodes[1], "apt-get update -qq && apt-get install -qq -y e2fsprogs >/dev/null 2>&1")
    on(nodes[1], "mkfs.ext4 -q /dev/vdb && mkdir -p /data && mount /dev/vdb /data && touch /data/kept")
    on(nodes[1], 'echo "UUID=$(blkid -s UUID -o value /dev/vdb) /data ext4 defaults,nofail 0 2" >>/etc/fstab')
    on(nodes[1], "systemd-run --on-active=0.3 systemctl reboot")
    wait_for("another boot", lambda: boot_id(nodes[1]) not in ("", boot), timeout_s=40)
    assert on(nodes[1], "findmnt --noheadings --output TARGET /data; ls /data/kept") == "/data\n/data/kept"


def test_wheels_reach_running_hosts_read_only(nodes):
    wheels = wheelhouse.folder() / "test-of-wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    (wheels / "a-1-py3-none-any.whl").touch()
    try:
        cloud.offer_wheels(SETTINGS, wheels)
        shown = "ls /opt/spotune/wheelhouse; touch /opt/spotune/wheelhouse/x 2>/dev/null || echo read-only"
        for node in nodes:
            assert on(node, shown).split() == ["a-1-py3-none-any.whl", "read-only"]
    finally:
        shutil.rmtree(wheels)
        Places.of(NAME).wheels.unlink()
        for node in nodes:
            on(node, "umount /opt/spotune/wheelhouse; rm /usr/local/lib/localcloud/wheels")


def test_an_image_that_fails_half_way_leaves_nothing_that_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images = tmp_path / "spotune" / "images"
    (images / ".building-dead" / "etc").mkdir(parents=True)
    with pytest.raises(LocalCloudError, match="mmdebstrap"):
        ensure_image(Recipe(mirror="http://127.0.0.1:9/debian"), silent)
    assert [path.name for path in images.iterdir()] == [".lock"]


def test_power_off_is_seen_and_up_boots_only_that_host(nodes):
    cloud.power_off(SETTINGS, "te2")
    assert [row.state for row in cloud.status(SETTINGS)] == ["running", "off"]
    with pytest.raises(ssh.SshError, match="te2"):
        ssh.connect(nodes[1], timeout_s=2)
    said = []
    cloud.up(SETTINGS, 2, said.append)
    assert said[0] == "booting te2"
    assert [row.state for row in cloud.status(SETTINGS)] == ["running", "running"]


def test_a_cut_host_is_unreachable_until_healed(nodes):
    cloud.cut(SETTINGS, "te1")
    assert cloud.status(SETTINGS)[0].state == "cut"
    with pytest.raises(ssh.SshError):
        ssh.connect(nodes[0], timeout_s=2)
    cloud.heal(SETTINGS, "te1")
    assert cloud.status(SETTINGS)[0].state == "running"
    assert on(nodes[0], "echo here") == "here"


def test_a_host_made_anew_has_another_address_and_key_but_the_same_disk(nodes):
    on(nodes[0], "echo mine | dd of=/dev/vdb conv=fsync status=none; touch /root/mark")
    new = cloud.recreate(SETTINGS, "te1", silent)
    assert (new.name, new.rank, new.disk_serial) == ("te1", 0, nodes[0].disk_serial)
    assert new.address != nodes[0].address
    assert nodes[0].address not in new.known_hosts.read_text()
    assert on(new, "head -c 4 /dev/vdb; ls /root") == "mine"
    assert cloud.recreate(SETTINGS, "te1", silent, fresh_disk=True).disk_serial != new.disk_serial


def test_a_host_that_cannot_boot_is_named_with_its_last_words(nodes):
    cloud.power_off(SETTINGS, "te2")
    init = Places.of(NAME).root("te2") / "usr/lib/systemd/systemd"
    init.rename(init.with_suffix(".away"))
    try:
        with pytest.raises(LocalCloudError, match=r"(?s)te2 stopped while booting.*console\.log"):
            cloud.up(SETTINGS, 2, silent)
    finally:
        init.with_suffix(".away").rename(init)
    assert [row.state for row in cloud.status(SETTINGS)] == ["running", "off"]


def test_down_finds_everything_without_a_record(nodes):
    assert traces()
    Places.of(NAME).record.write_text("{")
    with pytest.raises(SettingsError, match="damaged"):
        cloud.local_nodes(SETTINGS)
    cloud.down(SETTINGS)
    assert traces() == []
    cloud.down(SETTINGS)


def test_down_clears_up_after_a_crash_half_way(state_home, monkeypatch):
    def crash(places, each):
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "start", crash)
    with pytest.raises(KeyboardInterrupt):
        cloud.up(SETTINGS, 2, silent)
    monkeypatch.undo()
    os.environ["XDG_STATE_HOME"] = str(state_home)
    assert traces()
    cloud.down(SETTINGS)
    assert traces() == []
