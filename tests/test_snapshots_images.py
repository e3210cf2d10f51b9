"""An image of the head's system disk: nothing secret is in it, the head loses nothing, it goes with its snapshot."""

import contextlib
import os
import shutil
import subprocess
import threading

import pytest

from inventory.cloud.errors import CloudError
from inventory.localcloud.ecs.images import AVAILABLE_AFTER_S
from inventory.renting.tags import of_cluster
from snapshots import images
from snapshots.create import Window
from snapshots.images import WITH_TAG
from snapshots.listing import SnapshotError
from snapshots.on_node import sysprep
from snapshots.rebuild import planned
from tests.test_snapshots_tasks import SMALL, PaperCluster, all_of, ended, hurry, snapshot_of

SECRETS = {
    "etc/ssh/ssh_host_ed25519_key": 0o600,
    "root/.ssh/spotune_cluster": 0o600,
    "root/.ssh/authorized_keys": 0o600,
    "root/.cache/huggingface/token": 0o600,
    "home/me/.netrc": 0o644,
    "tmp/half-an-upload": 0o600,
}
OWN = {"etc/ssh/ssh_host_ed25519_key.pub": 0o644, "var/log/auth.log": 0o640, "etc/spotune/node.json": 0o644}
STAYS = {"usr/bin/program": 0o755, "etc/passwd": 0o644}
FSTAB = "UUID=1 / ext4 defaults 0 1\n/dev/disk/by-id/virtio-x /data ext4 defaults,nofail 0 2\n# /data\n"


@pytest.fixture
def disk(tmp_path):
    """A system disk in a folder, and a second name for each of its files, which shows what its blocks hold later."""
    root = tmp_path / "root"
    for name, mode in (SECRETS | OWN | STAYS | {"etc/machine-id": 0o444, "etc/fstab": 0o644}).items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(FSTAB if name == "etc/fstab" else f"private {name}")
        file.chmod(mode)
        (tmp_path / "blocks" / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(file, tmp_path / "blocks" / name)
    (tmp_path / "store").mkdir()
    return root


def contents(root):
    return {
        str(file.relative_to(root)): (file.read_bytes(), file.stat().st_mode, file.stat().st_mtime_ns // 10**9)
        for file in root.rglob("*")
        if file.is_file()
    }


def test_what_is_secret_is_off_the_disk_and_its_blocks_are_zeros_and_all_of_it_comes_back(disk, tmp_path):
    before = contents(disk)
    sysprep.strip(disk, tmp_path / "store")
    left = set(contents(disk))
    assert left == {*STAYS, "etc/machine-id", "etc/fstab"}
    assert (disk / "etc/machine-id").read_text() == ""
    assert "virtio-x" not in (disk / "etc/fstab").read_text() and "UUID=1 / " in (disk / "etc/fstab").read_text()
    for name in SECRETS:
        held = (tmp_path / "blocks" / name).read_bytes()
        assert held == bytes(len(held)), name
    assert sysprep.restore(disk, tmp_path / "store")
    assert contents(disk) == before
    assert not sysprep.restore(disk, tmp_path / "store"), "the timer comes too late"
    assert [file.name for file in (tmp_path / "store").iterdir()] == ["lock"]


def test_a_timer_that_comes_while_things_are_still_taken_away_waits_and_loses_nothing(disk, tmp_path, monkeypatch):
    before, begun, fired = contents(disk), threading.Event(), []
    overwrite = sysprep.overwrite

    def slowly(path):
        if not begun.is_set():
            begun.set()
            timer.start()
            timer.join(0.5)
        overwrite(path)

    timer = threading.Thread(target=lambda: fired.append(sysprep.restore(disk, tmp_path / "store")))
    monkeypatch.setattr(sysprep, "overwrite", slowly)
    sysprep.strip(disk, tmp_path / "store")
    timer.join(10)
    assert fired == [True] and contents(disk) == before


def test_too_much_to_lay_aside_is_refused_before_anything_is_gone(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(sysprep, "MOST_BYTES", 10)
    before = contents(disk)
    with pytest.raises(OSError, match="move to /data what is large there"):
        sysprep.strip(disk, tmp_path / "store")
    assert contents(disk) == before


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch, SMALL + "nodes = 2\n") as cluster:
        yield cluster


def image_of(cluster, monkeypatch, snapshot_id, lasted=True):
    @contextlib.contextmanager
    def aside(head):
        window = Window()
        yield window
        window.lasted = lasted

    def later(seconds):
        hurry(cluster, seconds=30)

    monkeypatch.setattr(images, "stripped", aside)
    monkeypatch.setattr("snapshots.progress.time.sleep", later)
    monkeypatch.setattr(images.time, "sleep", later)
    from inventory.renting.standing import rented_nodes

    head = rented_nodes(cluster.cloud, cluster.settings)[0]
    given = {"name": "n1", "gib": 1.5, "say": cluster.said.append}
    return images.take_image(cluster.cloud, cluster.settings, head, snapshot_id, **given)


def images_of(cluster):
    return {each.image_id: each for each in cluster.cloud.own_images(tags=of_cluster("demo"))}


def test_a_rebuild_makes_its_machines_of_the_newest_image_of_its_snapshot(cluster, monkeypatch):
    cluster.up(1, hours=500)
    old, new = snapshot_of(cluster), None
    hurry(cluster)
    first = image_of(cluster, monkeypatch, old)
    hurry(cluster, AVAILABLE_AFTER_S)
    second = image_of(cluster, monkeypatch, old)
    new = snapshot_of(cluster, name="n2")
    hurry(cluster)
    assert {each.tags[WITH_TAG] for each in images_of(cluster).values()} == {old}
    cluster.down()
    plan = planned(cluster.cloud, cluster.settings, old, 1)
    assert plan.machines.wish.image_id == second != first
    assert plan.machines.quotes[0].launch.image_id == second and f"system disks from {second}" in plan.steps[0].what
    assert planned(cluster.cloud, cluster.settings, new, 1).machines.wish.image_id == ""
    assert planned(cluster.cloud, cluster.settings, old, 1, with_image=False).machines.wish.image_id == ""


def test_where_the_keys_were_back_too_early_nothing_of_the_disk_is_kept(cluster, monkeypatch):
    cluster.up(1, hours=500)
    snapshot_id = snapshot_of(cluster)
    hurry(cluster)
    with pytest.raises(SnapshotError, match="would hold them and was deleted"):
        image_of(cluster, monkeypatch, snapshot_id, lasted=False)
    assert list(all_of(cluster)) == [snapshot_id] and images_of(cluster) == {}


def test_an_image_is_listed_costs_and_goes_with_its_snapshot(cluster, monkeypatch):
    cluster.up(1, hours=500)
    kept = snapshot_of(cluster)
    hurry(cluster)
    image_id = image_of(cluster, monkeypatch, kept)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(cluster.folder / "state"))
    (of_system,) = (s for s in all_of(cluster).values() if s.disk_kind == "system")
    listed = ended(cluster.fab("snapshots.list"), 0)
    assert image_id in listed and of_system.snapshot_id not in listed
    assert of_system.name in ended(cluster.fab("cost"), 0)
    with pytest.raises(CloudError, match="SnapshotCreatedImage"):
        cluster.cloud.delete_snapshot(of_system.snapshot_id)
    assert f"deleted {image_id}" in ended(cluster.fab("snapshots.prune", "--all", "--yes"), 0)
    assert all_of(cluster) == {} and images_of(cluster) == {}


def test_what_a_data_snapshot_left_behind_that_somebody_deleted_is_pruned(cluster, monkeypatch):
    cluster.up(1, hours=500)
    gone, stays = snapshot_of(cluster), None
    hurry(cluster)
    image_id = image_of(cluster, monkeypatch, gone)
    cluster.cloud.delete_snapshot(gone)
    stays = snapshot_of(cluster, name="n2")
    hurry(cluster)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(cluster.folder / "state"))
    assert f"deleted {image_id}" in ended(cluster.fab("snapshots.prune", "--yes"), 0)
    assert list(all_of(cluster)) == [stays] and images_of(cluster) == {}


def test_the_cloud_makes_images_of_whole_snapshots_of_system_disks_only(cluster):
    cluster.up(1, hours=500)
    (system,) = (d for d in cluster.cloud.disks() if d.kind == "system")
    data = snapshot_of(cluster)
    hurry(cluster)
    with pytest.raises(CloudError, match="not a system disk"):
        cluster.cloud.create_image(data, "n1", {}, "token-1")
    fresh = cluster.cloud.create_snapshot(system.disk_id, "n2", of_cluster("demo"), "token-2")
    no_wait = cluster.cloud
    no_wait.pace = no_wait.pace.__class__(**{**vars(no_wait.pace), "wait_limit_s": 0})
    with pytest.raises(CloudError, match="NotReady"):
        no_wait.create_image(fresh, "n1", {}, "token-3")
    hurry(cluster)
    one = cluster.cloud.create_image(fresh, "n1", of_cluster("demo"), "token-4")
    assert cluster.cloud.create_image(fresh, "n1", of_cluster("demo"), "token-4") == one
    assert images_of(cluster)[one].status == "Creating"
    hurry(cluster)
    assert images_of(cluster)[one].snapshot_id == fresh and images_of(cluster)[one].status == "Available"
    cluster.cloud.delete_image(one)
    cluster.cloud.delete_image(one)
    assert images_of(cluster) == {}


def test_a_machine_without_host_keys_makes_its_own_when_it_comes_up(tmp_path):
    text = sysprep.HOST_KEYS_UNIT
    assert "ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key" in text and "Before=ssh.service" in text
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    (tmp_path / "spotune-host-keys.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "spotune-host-keys.service"], capture_output=True, text=True
    )
    assert "spotune-host-keys" not in done.stderr, done.stderr
