"""Rented machines as nodes and as a pyinfra inventory; what the listed ones can, they can."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from inventory.cluster import load_cluster, ssh_files
from inventory.localcloud.ecs.lifecycle import reclaim
from inventory.nodes import pyinfra_hosts
from inventory.setting_types import SettingsError
from tests.support.paper_cluster import ROOT, PaperCluster
from tests.support.waiting import until


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        monkeypatch.setenv("SPOTUNE_CLUSTER", str(cluster.toml))
        yield cluster


def test_numbers_give_the_ranks_and_the_first_is_the_head(cluster):
    cluster.up(3)
    found = load_cluster()
    assert [(n.name, n.rank) for n in found.nodes] == [("te1", 0), ("te2", 1), ("te3", 2)]
    assert found.head.name == "te1"


def test_ranks_stay_when_a_machine_in_the_middle_is_replaced(cluster):
    cluster.up(3)
    before = {n.name: n.private_address for n in load_cluster().nodes}
    cluster.cloud.delete("instance", [cluster.machines["demo-te2"].instance_id], "by-hand")
    until(lambda: "demo-te2" not in cluster.machines, "the deletion")
    cluster.up(3)
    after = {n.name: n.private_address for n in load_cluster().nodes}
    assert list(after) == ["te1", "te2", "te3"]
    assert after["te2"] != before["te2"] and (after["te1"], after["te3"]) == (before["te1"], before["te3"])


def test_no_worker_becomes_the_head_when_the_head_is_gone(cluster):
    cluster.up(2)
    cluster.cloud.delete("instance", [cluster.machines["demo-te1"].instance_id], "by-hand")
    until(lambda: "demo-te1" not in cluster.machines, "the deletion")
    with pytest.raises(
        SettingsError, match=r"te1, the head of 'demo', is missing .*te2\); te1's data disk d-\S+ is kept: fab up "
    ):
        load_cluster()
    done = cluster.fab("status")
    assert done.returncode == 2 and "te2 " in done.stdout and "is kept: fab up" in done.stderr, done.stdout
    done = cluster.fab("train", "--resume")
    assert done.returncode == 2 and "te1, the head of 'demo', is missing" in done.stderr
    cluster.up(2)
    assert load_cluster().head.name == "te1"


def test_each_node_has_its_disks_serial_its_key_and_its_pinned_host_key(cluster):
    cluster.up(2)
    disks = {d.instance_id: d.serial for d in cluster.data_disks}
    for node in load_cluster().nodes:
        machine = cluster.machines[f"demo-{node.name}"]
        assert node.disk_serial == disks[machine.instance_id]
        assert (node.user, node.port, node.gpus, node.slots) == ("root", 22, 0, 1)
        assert node.address == node.private_address == machine.private_address
        assert node.key == cluster.places.own_key and node.key.is_file()
        assert f"{node.address} ssh-ed25519 " in node.known_hosts.read_text()


def test_pyinfra_verifies_host_keys_and_needs_no_sudo(cluster):
    cluster.up(1)
    found = load_cluster()
    ((name, data),) = pyinfra_hosts(found.settings, found.nodes, ssh_files(found.nodes))
    assert (name, data["ssh_strict_host_key_checking"], data["_sudo"]) == ("te1", "yes", False)
    known = Path(data["ssh_known_hosts_file"]).read_text().strip()
    assert known and cluster.places.known_hosts.read_text().startswith(known), "but for the comment behind the key"


def test_the_inventory_file_lists_the_nodes(cluster):
    cluster.up(2)
    listed = runpy.run_path(str(ROOT / "inventory" / "aliyun.py"))["nodes"]
    assert [(name, data["ssh_hostname"]) for name, data in listed] == [
        (n.name, n.address) for n in load_cluster().nodes
    ]


def test_without_machines_it_names_the_command_that_rents_them(cluster):
    with pytest.raises(SettingsError, match="fab up"):
        load_cluster()
    done = cluster.pyinfra("--dry", "-y", "inventory/aliyun.py", "exec", "--", "true")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the cluster 'demo' has no machines in cn-hangzhou; rent them: fab up" in done.stderr


@pytest.mark.parametrize(
    ("text", "inventory", "reason"),
    [
        ('provider = "local"', "inventory/aliyun.py", "provider: "),
        ('provider = "aliyun"\n[aliyun]\nendpoint = "local"', "inventory/static.py", "use inventory/aliyun.py"),
        ('provider = "aliyun"\n[aliyun]\ncolour = 1', "inventory/aliyun.py", "aliyun.colour: unknown key"),
        ('provider = "aliyun"\nname = "none"\n[aliyun]\nendpoint = "local"', "inventory/aliyun.py", "fab local.serve"),
    ],
)
def test_a_mistake_ends_pyinfra_with_one_sentence_and_code_2(cluster, text, inventory, reason):
    cluster.toml.write_text(text)
    done = cluster.pyinfra("--dry", "-y", inventory, "exec", "--", "true")
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr and "Traceback" not in done.stderr


def test_fab_up_without_a_terminal_shows_the_price_and_makes_nothing(cluster):
    done = cluster.fab("up", "--nodes", "2")
    assert done.returncode == 2, done.stderr
    assert "rent 2 machines?" in done.stderr and "fab up --nodes 2 --yes" in done.stderr
    assert re.search(r"price: 2 x \d+\.\d{2,4} = \d+\.\d{2,4} CNY an hour, \d+\.\d\d CNY until \d{4}-", done.stdout)
    for word in (
        "ecs.local.small",
        "billed:",
        "free:",
        "ssh is open to 10.213.77.1/32 only",
        "releases them by itself",
    ):
        assert word in done.stdout
    assert cluster.machines == {}


def test_the_command_that_says_yes_has_the_flags_that_were_given(cluster):
    done = cluster.fab("up", "--nodes", "1", "--hours", "6", "--partial")
    assert "rent 1 machine?" in done.stderr and "fab up --nodes 1 --hours 6 --partial --yes" in done.stderr


def test_fab_up_dry_ends_well_and_makes_nothing(cluster):
    done = cluster.fab("up", "--dry", "--hours", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "price: " in done.stdout and cluster.machines == {}


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("--nodes 101", "--nodes 101: a cluster has 1 to 100 machines"),
        ("--nodes -1", "--nodes -1"),
        ("--hours 0.1", "--hours 0.1: machines are rented for"),
        ("--hours soon", "--hours needs a number"),
    ],
)
def test_flags_that_make_no_sense_are_one_sentence(cluster, argv, reason):
    done = cluster.fab("up", *shlex.split(argv))
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr


def test_fab_status_shows_the_machines_first_and_how_long_they_are_there(cluster):
    cluster.up(1)
    done = cluster.fab("status")
    account, *first = done.stdout.splitlines()
    assert account.split()[0] == "account"
    assert first[0].split()[:3] == ["machine", "state", "type"]
    assert "te1" in first[1] and "Running" in first[1] and "3 h 5" in first[1]


def test_a_machine_that_is_taken_back_is_not_said_to_be_there_until_its_release(cluster):
    cluster.up(2)
    reclaim(cluster.api.cloud, cluster.machines["demo-te1"].instance_id, notice_s=300)
    for command in ("status", "cost"):
        said = cluster.fab(command).stdout.splitlines()
        head, other = (next(line for line in said if line.startswith(f"te{k} ")) for k in (1, 2))
        assert "soon: reclaimed" in head and "3 h 5" not in head
        assert "reclaimed" not in other and "soon" not in other
