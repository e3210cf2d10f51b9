"""Real hosts on this machine: what a rented one would give, what can happen to it, and that nothing stays."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from paramiko import SSHException

from inventory import ssh
from inventory.localcloud import host, image, inside, network, served
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.image import ImageRecipe, ensure_image
from inventory.localcloud.places import Places
from tests.support.local_cluster import ROOT, LocalCluster
from tests.support.waiting import until

pytestmark = pytest.mark.localcloud
pytest.importorskip("alibabacloud_tea_openapi", reason="needs the [aliyun] extra: the vendor's SDK")

NAME = "tlc"


def silent(line):
    """Progress nobody reads."""


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """A cloud of our own, in which nothing is rented yet."""
    local = LocalCluster(tmp_path_factory.mktemp("cloud"), name=NAME, subnet="10.213.83.0/24", keep_data_disk="all")
    with local.at_home():
        yield local
        local.leave()


@pytest.fixture
def nodes(cloud):
    """Two running machines, whatever the test before did to them."""
    if list(status(cloud).values()) != ["Running", "Running"]:
        cloud.fab("local.serve", "--no-wheels")
        cloud.up()
    return cloud.cluster.nodes


@pytest.fixture
def disk_folder(nodes):
    return "/dev/disk/by-id/virtio-" + nodes[0].disk_serial


def places():
    """Asked inside `at_home`."""
    return Places.of(NAME)


def status(cloud):
    """Name and state of every machine, and whether it is cut off, as the command shows them."""
    told = [line.split() for line in cloud.fab("local.status").stdout.splitlines()[1:]]
    return {words[0]: " ".join([words[1], *words[6:]]) for words in told}


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
    commands = ("ps -eo args", "losetup --list", "ip link", "nft list tables")
    shown = [subprocess.check_output(command.split(), text=True) for command in commands]
    lines = "".join([*shown, Path("/proc/mounts").read_text()]).splitlines()
    ours = places()
    marks = (str(ours.folder), ours.bridge, ours.table, ours.link(""), ours.machine("m"))
    found = [line for line in lines if any(mark in line for mark in marks)]
    folders = [path for path in (ours.folder, host.PROPAGATION / ours.machine("m1")) if path.exists()]
    return found + list(inside.groups_named(ours.group_prefix)) + folders


def test_a_host_answers_with_a_clouds_name_and_its_own_address(nodes):
    known = served.machines(places())
    assert [each.name for each in known] == [f"{NAME}-te1", f"{NAME}-te2"] and known[0].hostname.startswith("iZ")
    assert [on(node, "hostname") for node in nodes] == [each.hostname for each in known]
    assert f"{nodes[1].address}/24" in on(nodes[1], "ip -brief address show host0")


def test_hosts_reach_each_other_and_packages(nodes):
    on(nodes[0], f"ping -c 1 -W 2 {nodes[1].address}")
    on(nodes[0], "apt-get update -qq && apt-get install -qq -y --download-only ninja-build")


def test_the_data_disk_is_found_by_serial_and_blank(nodes, disk_folder):
    assert on(nodes[0], f"readlink -f {disk_folder}") == "/dev/vdb"
    assert on(nodes[0], f"blockdev --getsize64 {disk_folder}") == str(20 << 30)
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
    public = places().root(served.find(places(), "te1").machine) / "etc/ssh/ssh_host_ed25519_key.pub"
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


def test_up_again_changes_nothing(cloud, nodes):
    before = boot_id(nodes[0])
    assert "2 machines are there; none is missing" in cloud.up().stdout
    assert cloud.cluster.nodes == nodes
    assert boot_id(nodes[0]) == before


def test_a_reboot_comes_back_with_disk_mount_and_files(nodes):
    boot = boot_id(nodes[1])
    on(nodes[1], "apt-get update -qq && apt-get install -qq -y e2fsprogs >/dev/null 2>&1")
    on(nodes[1], "mkfs.ext4 -q /dev/vdb && mkdir -p /data && mount /dev/vdb /data && touch /data/kept")
    on(nodes[1], 'echo "UUID=$(blkid -s UUID -o value /dev/vdb) /data ext4 defaults,nofail 0 2" >>/etc/fstab')
    on(nodes[1], "systemd-run --on-active=0.3 systemctl reboot")
    until(lambda: boot_id(nodes[1]) not in ("", boot), "another boot", 40)
    assert on(nodes[1], "findmnt --noheadings --output TARGET /data; ls /data/kept") == "/data\n/data/kept"


def test_wheels_reach_running_hosts_read_only(nodes):
    wheels = image.folder() / "test-of-wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    (wheels / "a-1-py3-none-any.whl").touch()
    try:
        served.show_wheels(places(), wheels)
        shown = "ls /opt/spotune/wheelhouse; touch /opt/spotune/wheelhouse/x 2>/dev/null || echo read-only"
        for node in nodes:
            assert on(node, shown).split() == ["a-1-py3-none-any.whl", "read-only"]
    finally:
        shutil.rmtree(wheels)
        places().wheels.unlink()
        for node in nodes:
            on(node, "umount /opt/spotune/wheelhouse; rm /usr/local/lib/localcloud/wheels")


def test_an_image_that_fails_half_way_leaves_nothing_that_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images = tmp_path / "spotune" / "images"
    (images / ".building-dead" / "etc").mkdir(parents=True)
    with pytest.raises(LocalCloudError, match="mmdebstrap"):
        ensure_image(ImageRecipe(mirror="http://127.0.0.1:9/debian"), silent)
    assert [path.name for path in images.iterdir()] == [".lock"]


def test_power_off_is_seen_and_up_boots_only_that_host(cloud, nodes):
    before = boot_id(nodes[0])
    cloud.happens("off", "te2")
    assert status(cloud) == {"te1": "Running", "te2": "Stopped"}
    with pytest.raises(ssh.SshError, match="te2"):
        ssh.connect(nodes[1], timeout_s=2)
    cloud.up()
    assert status(cloud) == {"te1": "Running", "te2": "Running"}
    assert boot_id(nodes[0]) == before and boot_id(nodes[1])


def test_a_cut_host_is_unreachable_until_healed(cloud, nodes):
    cloud.happens("cut", "te1")
    assert status(cloud)["te1"] == "Running cut off"
    with pytest.raises(ssh.SshError):
        ssh.connect(nodes[0], timeout_s=2)
    cloud.happens("heal", "te1")
    assert status(cloud)["te1"] == "Running"
    assert on(nodes[0], "echo here") == "here"


MBIT, CORES = 20, 0.5
SENT = 5_000_000
SINK = """
import socket, time
server = socket.create_server(("", 5301))
print("listens", flush=True)
link = server.accept()[0]
link.recv(1)
began = time.monotonic()
while link.recv(1 << 16):
    pass
print(time.monotonic() - began)
"""
SOURCE = 'import socket; socket.create_connection(("{address}", 5301)).sendall(bytes({size}))'
BURN = "import time; began = time.monotonic()\nwhile time.process_time() < 1: pass\nprint(time.monotonic() - began)"


def carried_s(sender, receiver):
    """How long SENT bytes of plain TCP are under way in one direction, by the receiver's clock."""
    with ssh.connect(receiver) as connection:
        _, answers, _ = connection.client.exec_command(f"python3 -c {shlex.quote(SINK)}")
        assert answers.readline() == "listens\n"
        on(sender, f"python3 -c {shlex.quote(SOURCE.format(address=receiver.private_address, size=SENT))}")
        return float(answers.readline())


def rates(cloud_name):
    """In Mbit/s, what a machine's cable is slowed to towards it and from it; None where it is not."""
    machine = served.find(places(), cloud_name).machine
    own_network = ["nsenter", f"--target={inside.leader(places(), machine)}", "--net"]
    buckets = network._bucket(places().link(machine), []), network._bucket(network.INSIDE, own_network)
    return [bucket and bucket["rate"] * 8 / 1e6 for bucket in buckets]


@pytest.mark.proof  # two boots, on half a core
def test_a_slowed_host_is_as_slow_as_asked_both_ways_and_after_its_next_boots(cloud, nodes):
    cloud.happens("shape", "--mbit", str(MBIT), "--cpu", str(CORES), "--hosts", "te2")
    try:
        assert status(cloud) == {"te1": "Running", "te2": "Running 20 Mbit/s each way, 0.5 cores"}
        assert (rates("te1"), rates("te2")) == ([None, None], [MBIT, MBIT])
        for sender, receiver in (nodes, nodes[::-1]):
            assert carried_s(sender, receiver) > 0.9 * SENT * 8 / (MBIT * 1e6)
        assert float(on(nodes[1], f"python3 -c {shlex.quote(BURN)}")) > 0.9 / CORES
        cloud.happens("off", "te2")
        cloud.happens("on", "te2")
        assert status(cloud)["te2"] == "Running 20 Mbit/s each way, 0.5 cores"
        boot = boot_id(nodes[1])
        on(nodes[1], "systemd-run --on-active=0.3 systemctl reboot")
        until(lambda: boot_id(nodes[1]) not in ("", boot), "another boot", 60)
        assert status(cloud)["te2"] == "Running 20 Mbit/s each way, 0.5 cores"
        assert rates("te2") == [MBIT, MBIT]
    finally:
        cloud.happens("shape", "--off")
    assert status(cloud) == {"te1": "Running", "te2": "Running"}
    assert rates("te2") == [None, None]


def test_what_cannot_be_asked_of_hosts_is_one_sentence_and_changes_nothing(cloud, nodes):
    for flags, said in (
        (["--mbit", "0"], "--mbit 0: a link takes Mbit/s from 0.1 to 10000"),
        (["--mbit", "33", "--hosts", "te1,te9"], "there is no machine 'te9'; there is: te1, te2"),
        (["--cpu", "900"], "--cpu 900: a host takes from 0.1 to"),
    ):
        done = cloud.fab("local.shape", *flags)
        assert done.returncode == 2 and said in done.stdout and "Traceback" not in done.stdout
    assert status(cloud) == {"te1": "Running", "te2": "Running"}


def test_a_host_made_anew_has_another_address_and_key_but_the_same_disk(cloud, nodes):
    on(nodes[0], "echo mine | dd of=/dev/vdb conv=fsync status=none; touch /root/mark")
    keys = cloud.host_keys()
    cloud.happens("reclaim", "te1", "--notice", "0")
    cloud.up()
    new = cloud.node("te1")
    assert (new.name, new.rank, new.disk_serial) == ("te1", 0, nodes[0].disk_serial)
    assert new.address != nodes[0].address
    assert cloud.host_keys()["te1"] != keys["te1"]
    assert on(new, "head -c 4 /dev/vdb; ls /root") == "mine"


def test_a_host_that_cannot_boot_is_named_with_its_last_words(cloud, nodes):
    cloud.happens("off", "te2")
    init = places().root(served.find(places(), "te2").machine) / "usr/lib/systemd/systemd"
    init.rename(init.with_suffix(".away"))
    try:
        done = cloud.fab("local.on", "te2")
    finally:
        init.with_suffix(".away").rename(init)
    assert done.returncode == 2, done.stdout
    assert "te2 is Stopped" in done.stdout and "console.log" in done.stdout and "Traceback" not in done.stdout
    assert status(cloud) == {"te1": "Running", "te2": "Stopped"}


def test_down_finds_everything_without_a_record(cloud, nodes):
    assert traces()
    places().world.write_text("{")
    told = cloud.fab("local.status")
    assert told.returncode == 2 and "damaged; `fab local.down` clears up" in told.stdout
    cloud.happens("down", "--yes")
    assert traces() == []
    cloud.happens("down", "--yes")


def test_down_clears_up_after_a_crash_half_way(cloud):
    cloud.fab("local.serve", "--no-wheels")
    renting = subprocess.Popen(["fab", "up", "--yes"], cwd=ROOT, env=cloud.env, stdout=subprocess.DEVNULL)
    try:
        until(lambda: inside.groups_named(places().group_prefix), "a host boots", 60)
        os.kill(json.loads((places().folder / "api.json").read_text())["pid"], signal.SIGKILL)
    finally:
        renting.kill()
        renting.wait()
    assert traces()
    cloud.happens("down", "--yes")
    assert traces() == []
