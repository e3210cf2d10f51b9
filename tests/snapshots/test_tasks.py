"""Snapshots against the local cloud's API with machines on paper, and the node's programs as nodes run them."""

import contextlib
import json
import os
import subprocess
import time
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import pytest

from inventory import node_program
from inventory.cloud.errors import CloudError, RentError
from inventory.nodes import Node
from inventory.renting import down, members, tags
from inventory.renting.intents import Intents
from inventory.renting.ledger import Ledger
from inventory.ssh import SshError
from snapshots import node_disks
from snapshots.create import (
    Window,
    checked_name,
    create,
    cut_off,
    freeze_command,
    head_disk,
    one_in_progress,
    tell_cut_off,
    thaw_command,
    version,
)
from snapshots.listing import (
    KEEP_TAG,
    UNFROZEN_TAG,
    YES,
    Contents,
    SnapshotError,
    chosen,
    from_tags,
    to_tags,
    usable,
    wait,
    whole,
)
from snapshots.node_disks import ReadSoFar, begin, groups_for
from snapshots.rebuild import Rebuilding, planned
from snapshots.steps import DEPLOYED_TAG, WARMED_TAG
from tests.support.paper_cluster import SMALL, PaperCluster
from tests.support.ssh_server import SshServer
from tests.support.waiting import as_soon_as, until

INSIDE = Contents("demo", environment="e" * 64, run="tiny-20261121-101500", step=8, written_gib=2.0, filesystem="ext4")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch, SMALL + "nodes = 2\n") as cluster:
        yield cluster


@contextlib.contextmanager
def frozen(lasted=True):
    """In the place of ssh to a machine that is on paper."""
    window = Window()
    try:
        yield window
    finally:
        window.lasted = lasted


def silent(words, share):
    """Shows nothing."""


def intents(cluster):
    return Intents(cluster.places.intents)


def head_of(cluster):
    return head_disk(members.existing(cluster.cloud, cluster.settings))


def create_with(frozen, cluster, name, contents=INSIDE):
    """`create` with another freezing than over ssh."""
    _, disk = head_of(cluster)
    with patch("snapshots.create.frozen", lambda head: frozen()):
        return create(cluster.cloud, intents(cluster), disk, name, tags=to_tags(contents), head=None)


def snapshot_of(cluster, contents=INSIDE, lasted=True, name="n1"):
    return create_with(lambda: frozen(lasted), cluster, name, contents)[0]


def all_of(cluster):
    return {s.snapshot_id: s for s in cluster.cloud.snapshots(tags=tags.of_cluster("demo"))}


def hurry(cluster, seconds=3600):
    cluster.api.cloud.account.clock_offset_s += seconds


def test_a_snapshot_is_made_tagged_and_waited_for(cluster):
    cluster.up(1)
    snapshot_id = snapshot_of(cluster)
    assert from_tags(all_of(cluster)[snapshot_id].tags) == INSIDE
    assert Ledger.of(cluster.cloud, cluster.settings).read()[snapshot_id].ended is None, "it is billed from now on"
    shown = []
    wait(cluster.cloud, snapshot_id, usable, lambda words, share: shown.append((words, share)))
    assert not whole(all_of(cluster)[snapshot_id])
    hurry(cluster)
    assert whole(wait(cluster.cloud, snapshot_id, whole, lambda words, share: shown.append((words, share))))
    assert "being made" in shown[0][0] and shown[-1] == (f"{snapshot_id} is whole", 1.0)


def test_a_snapshot_of_a_moment_ago_that_is_in_no_list_stays_in_the_ledger(cluster):
    cluster.up(1)
    snapshot_id, book = snapshot_of(cluster), Ledger.of(cluster.cloud, cluster.settings)
    with patch.object(type(book.cloud), "snapshots", lambda *_, **__: ()):
        book.record_kept((), (), cluster.cloud.now())
        assert book.read()[snapshot_id].ended is None
        book.record_kept((), (), cluster.cloud.now() + timedelta(minutes=2))
    assert book.read()[snapshot_id].ended is not None


def test_no_workers_disk_is_kept_in_place_of_a_head_that_is_gone(cluster):
    cluster.up(2)
    for name in ("demo-te1", "demo-te2"):
        down.remove(cluster.cloud, [cluster.machines[name].instance_id], intents(cluster))
        with pytest.raises(SnapshotError, match="te1, the head, is missing: fab rebuild"):
            head_of(cluster)


def test_a_disk_that_thawed_too_early_leaves_a_mark(cluster):
    cluster.up(1)
    snapshot_id = snapshot_of(cluster, lasted=False)
    assert all_of(cluster)[snapshot_id].tags[UNFROZEN_TAG] == YES


@pytest.mark.parametrize("kind", ["throttle", "error-500", "lost-answer", "time-out"])
def test_a_fault_at_the_call_makes_one_snapshot_and_thaws(cluster, kind):
    cluster.up(1)
    cluster.api.fault("CreateSnapshot", kind, hold_s=0.1)
    snapshot_id = snapshot_of(cluster)
    assert list(all_of(cluster)) == [snapshot_id]
    assert intents(cluster).pending() == {}


def test_a_later_command_takes_a_new_snapshot_and_names_the_one_nobody_heard_of(cluster):
    cluster.up(1)
    cluster.api.fault("CreateSnapshot", "lost-answer", times=99)
    thawed = []

    @contextlib.contextmanager
    def watched():
        with frozen() as rest:
            try:
                yield rest
            finally:
                thawed.append(True)

    with pytest.raises(CloudError):
        create_with(watched, cluster, "n1")
    assert thawed == [True] and list(intents(cluster).pending()) == ["snapshot"]
    cluster.api.faults.path.unlink()
    (unheard,) = all_of(cluster)
    hurry(cluster)
    tell_cut_off(cluster.cloud, intents(cluster), cluster.said.append)
    assert cluster.said[-1].startswith(f"{unheard}, begun by a command that was cut off, is there too")
    assert snapshot_of(cluster) != unheard and len(all_of(cluster)) == 2


def test_a_token_that_was_left_behind_is_not_used_for_another_moment(cluster):
    cluster.up(1)
    first = snapshot_of(cluster)
    _, disk = head_of(cluster)
    token = all_of(cluster)[first].tags[tags.INTENT_TAG]
    request = {"disk": disk.disk_id, "name": "n1", "tags": to_tags(INSIDE)}
    with contextlib.suppress(KeyboardInterrupt), intents(cluster).begun("snapshot", request):
        raise KeyboardInterrupt
    pending = json.loads(cluster.places.intents.read_text())
    pending["snapshot"]["token"] = token
    cluster.places.intents.write_text(json.dumps(pending))
    hurry(cluster)
    assert snapshot_of(cluster) != first


def test_an_order_that_the_cloud_never_heard_is_not_waited_for_longer_than_it_can_be_unlisted(cluster):
    cluster.up(1)
    with contextlib.suppress(KeyboardInterrupt), intents(cluster).begun("snapshot", {}):
        raise KeyboardInterrupt
    before = len(cluster.calls("DescribeSnapshots"))
    assert cut_off(cluster.cloud, intents(cluster)) is None
    looks, pace = len(cluster.calls("DescribeSnapshots")) - before, cluster.cloud.pace
    assert 1 < looks <= 2 + pace.settle_s / pace.poll_s


def test_a_disk_is_not_frozen_while_the_cloud_is_not_ready(cluster):
    cluster.up(1)
    first, times = snapshot_of(cluster, name="n1"), []
    _, disk = head_of(cluster)
    assert one_in_progress(cluster.cloud, disk).snapshot_id == first

    @contextlib.contextmanager
    def timed():
        began = time.monotonic()
        with frozen() as rest:
            yield rest
        times.append(time.monotonic() - began)

    as_soon_as(lambda: len(cluster.calls("CreateSnapshot")) > 2, lambda: hurry(cluster))
    second, _ = create_with(timed, cluster, "n2")
    assert second != first and len(all_of(cluster)) == 2
    assert len(cluster.calls("CreateSnapshot")) > 2  # refused, thawed, asked again


def test_a_failed_or_deleted_snapshot_ends_the_waiting(cluster):
    cluster.up(1)
    snapshot_id = snapshot_of(cluster)
    cluster.api.cloud.account.snapshots[snapshot_id].failed = True
    with pytest.raises(SnapshotError, match="failed; was its machine stopped meanwhile"):
        wait(cluster.cloud, snapshot_id, usable, silent)
    cluster.cloud.delete("snapshot", [snapshot_id])
    with pytest.raises(SnapshotError, match="is gone"):
        wait(cluster.cloud, snapshot_id, usable, silent)


@pytest.mark.parametrize("name", ["auto1", "1st", "x", "a b", "a" * 129])
def test_names_the_cloud_would_refuse_are_refused_here(name):
    with pytest.raises(RentError, match="--name"):
        checked_name(name, "demo", "")
    assert checked_name("", "auto", "") == "spotune-auto-environment"


# --- the commands as a user types them ----------------------------------------------------------------------


def ended(done, code):
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("argv", [["snapshots.list"], ["snapshots.prune"], ["rebuild"]])
def test_only_rented_clusters_have_snapshots(tmp_path, monkeypatch, argv):
    cluster = PaperCluster(tmp_path, monkeypatch)
    cluster.toml.write_text(
        f'provider = "static"\n[ssh]\nkey = "{__file__}"\n[[nodes]]\nname = "te1"\naddress = "192.0.2.1"\n'
    )
    assert 'provider = "aliyun"' in ended(cluster.fab(*argv), 2)


def test_list_and_prune_say_what_there_is_and_delete_what_may_go(cluster):
    assert "no snapshots of cluster 'demo' in cn-hangzhou; make one: fab snapshots.create" in ended(
        cluster.fab("snapshots.list"), 0
    )
    cluster.up(1)
    made = []
    for n in range(3):
        made.append(snapshot_of(cluster, Contents("demo", keep=n == 0, written_gib=2.0), name=f"n{n}"))
        hurry(cluster)
    listed = ended(cluster.fab("snapshots.list"), 0)
    assert all(snapshot_id in listed for snapshot_id in made) and "a month together" in listed
    dry = ended(cluster.fab("snapshots.prune", "--keep-last", "1", "--dry"), 0)
    assert "made with --keep" in dry and len(all_of(cluster)) == 3
    asked = ended(cluster.fab("snapshots.prune", "--keep-last", "1"), 2)
    assert "to say yes: fab snapshots.prune --keep-last 1 --yes" in asked
    assert f"deleted {made[1]}" in ended(cluster.fab("snapshots.prune", "--keep-last", "1", "--yes"), 0)
    assert sorted(all_of(cluster)) == sorted([made[0], made[2]])
    assert all_of(cluster)[made[0]].tags[KEEP_TAG] == YES
    assert "nothing to delete" in ended(cluster.fab("snapshots.prune"), 0)


def test_prune_all_after_down_with_disks_leaves_nothing_that_is_billed(cluster):
    cluster.up(1)
    kept = snapshot_of(cluster, Contents("demo", keep=True), name="n1")
    hurry(cluster)
    unfinished = snapshot_of(cluster, name="n2")
    cluster.down(disks=True, anyway=True)
    cluster.up(1, snapshot=chosen(cluster.cloud, cluster.settings, kept))
    first = ended(cluster.fab("snapshots.prune", "--all", "--yes"), 0)
    assert f"{kept} remain and are billed" in first and "fab down --disks" in first and list(all_of(cluster)) == [kept]
    assert f"deleted {unfinished}" in first
    cluster.down(disks=True)
    asked = ended(cluster.fab("snapshots.prune", "--all"), 2)
    assert "No whole one is left then" in asked and "to say yes: fab snapshots.prune --all --yes" in asked
    assert "although made with --keep" in asked and list(all_of(cluster)) == [kept]
    assert "no snapshot is left" in ended(cluster.fab("snapshots.prune", "--all", "--yes"), 0)
    assert not (cluster.machines or cluster.cloud.disks() or cluster.cloud.snapshots())


def test_a_kept_disk_that_could_not_be_had_is_said_at_the_end_of_a_rebuild(cluster, monkeypatch):
    cluster.up(1)
    snapshot_id = snapshot_of(cluster)
    hurry(cluster)
    cluster.down()
    (kept,) = cluster.data_disks
    cluster.api.fault("RunInstances", "no-stock", zone=kept.zone_id, times=99)
    monkeypatch.setattr("inventory.renting.machines.reached", lambda *_: None)
    cloud, settings = cluster.cloud, cluster.settings
    plan = planned(cloud, settings, "latest", 1)
    plan = replace(plan, steps=tuple(step for step in plan.steps if step.kind == "machines"))
    Rebuilding(cloud, settings, plan, "", (), lambda: None, cluster.said.append).do_all()
    (machine,) = cluster.machines.values()
    assert machine.zone_id != kept.zone_id
    assert f"te1 did not get its kept disk {kept.disk_id} back: that lies in {kept.zone_id}" in cluster.said[-1]
    assert f"te1 has {snapshot_id} instead" in cluster.said[-1]


def test_a_rebuild_without_a_snapshot_names_the_other_way(cluster):
    assert "Without one: fab up" in ended(cluster.fab("rebuild"), 2)
    assert "snapshots belong to one region" in ended(cluster.fab("rebuild", "--snapshot", "s-none"), 2)
    for given in ("-1", "0", "101", "two"):
        assert f"--nodes {given}: a cluster has 1 to 100 machines" in ended(cluster.fab("rebuild", "--nodes", given), 2)
    assert "unknown model" in ended(cluster.fab("rebuild", "--model", "gpt-9"), 2)


def test_a_rebuild_shows_its_steps_and_asks_before_it_rents(cluster):
    cluster.up(1)
    snapshot_id = snapshot_of(cluster)
    hurry(cluster)
    cluster.down(disks=True)
    dry = ended(cluster.fab("rebuild", "--dry"), 0)
    assert f"te1, te2 from {snapshot_id}" in " ".join(dry.split())
    assert "to say yes: fab rebuild --nodes 1 --yes" in ended(cluster.fab("rebuild", "--nodes", "1"), 2)
    assert cluster.machines == {} and cluster.data_disks == []


def test_a_rebuilt_clusters_disks_come_from_the_snapshot_and_then_there_is_nothing_to_do(cluster):
    cluster.up(1)
    snapshot_id = snapshot_of(cluster)
    hurry(cluster)
    cluster.down(disks=True)
    cluster.up(2, snapshot=chosen(cluster.cloud, cluster.settings, "latest"))
    there = members.existing(cluster.cloud, cluster.settings)
    found = [members.data_disk(i, there.disks) for i in there.instances]
    assert [d.source_snapshot_id for d in found] == [snapshot_id] * 2
    assert "read what training needs on te1, te2" in " ".join(ended(cluster.fab("rebuild", "--dry"), 0).split())
    cluster.cloud.tag("instance", [i.instance_id for i in there.instances], {DEPLOYED_TAG: YES})
    assert "base deploy" not in ended(cluster.fab("rebuild", "--dry"), 0).split("what ")[0]
    cluster.cloud.tag("disk", [d.disk_id for d in found], {WARMED_TAG: YES})
    assert "there is nothing to do: 2 machines stand, deployed and warm" in ended(cluster.fab("rebuild"), 0)


def test_the_version_is_the_projects():
    assert version().count(".") == 2


# --- the programs nodes run, over a real ssh server -------------------------------------------------------------


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with SshServer() as server:
        yield server.node(tmp_path_factory.mktemp("ssh"))


def listen(node, program, question, heard):
    with node_program.started(node, program, question) as running:
        for message in running.messages():
            heard(message)


def read(node, groups, heard):
    listen(node, node_disks.program("read_ahead.py"), {"groups": groups, "readers": 4}, heard)


def test_reading_ahead_reads_every_byte_in_the_order_asked(node, tmp_path):
    for name, size in (("env", 3_000_000), ("model", 70 << 20)):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_bytes(os.urandom(1000) * (size // 1000))
    (tmp_path / "env/link").symlink_to("deep/file")
    heard = []
    read(node, [("a", [str(tmp_path / "env")]), ("b", [str(tmp_path / "model")])], heard.append)
    total = sum(path.stat().st_size for path in tmp_path.rglob("file"))
    assert heard[-1] == {"label": "b", "done": total, "total": total}
    assert heard[0]["done"] == 0
    done = [message["done"] for message in heard]
    assert done == sorted(done)


def test_a_program_ends_when_whoever_asked_has_gone(node, tmp_path):
    folder = tmp_path / f"gone{os.getpid()}"
    folder.mkdir()
    with (folder / "never").open("wb") as file:
        file.truncate(1 << 40)  # of holes: takes no room, and minutes to read
    question = {"groups": [("files", [str(folder)])], "readers": 1}

    def running():
        told = subprocess.run(["pgrep", "-f", f"gone{os.getpid()}"], capture_output=True, text=True, check=False)
        return [pid for pid in told.stdout.split() if int(pid) != os.getpid()]

    with node_program.started(node, node_disks.program("read_ahead.py"), question) as program:
        assert next(program.messages())["total"] == 1 << 40
        assert running()
    until(lambda: not running(), "the end of the program")


def test_a_program_that_fails_says_its_last_words(node):
    with pytest.raises(SshError, match=r"te1: .*KeyError"):
        listen(node, node_disks.program("read_ahead.py"), {}, print)


def test_a_look_refuses_a_node_whose_disk_is_not_mounted(node):
    if os.path.ismount("/data"):
        pytest.skip("this machine has a /data")
    with pytest.raises(SshError, match="no disk is mounted at /data"):
        node_disks.look(node, "pyinfra")


def test_warming_reads_on_all_nodes_and_names_the_one_that_fails(node, tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    gone = Node("te2", 1, "127.0.0.1", "127.0.0.1", "root", 1, node.key, node.known_hosts, 0, "2")
    shown = []
    groups = {name: [("files", [str(tmp_path)])] for name in ("te1", "te2")}
    failed = begin([node, gone], lambda: groups).watch(lambda words, share: shown.append((words, share)))
    assert list(failed) == ["te2"] and "cannot be reached" in failed["te2"]
    assert "warming files" in shown[-1][0]


def test_ctrl_c_skips_the_warming(node, tmp_path):
    (tmp_path / "file").write_bytes(b"x")

    def interrupt(words, share):
        raise KeyboardInterrupt

    assert begin([node], lambda: {"te1": [("files", [str(tmp_path)])]}).watch(interrupt) is None


def test_what_was_read_says_what_is_left_of_the_slowest_node():
    pace = ReadSoFar(began=0.0)
    pace.take("te1", {"done": 2 * 10**9, "total": 2 * 10**9, "label": "the model"})
    pace.take("te2", {"done": 10**9, "total": 2 * 10**9, "label": "the environment"})
    words, share = pace.words(10.0)
    assert words == "warming the environment: 2.8 GiB of 3.7 GiB, 300.0 MB/s, 10 s left" and share == 0.75
    assert ReadSoFar(began=0.0).words(1.0)[1] == 1.0


def test_the_checkpoint_is_read_on_the_head_alone_which_restores_it():
    run = {"id": "r", "step": 8, "model_dir": "tiny"}
    assert [label for label, _ in groups_for(0, ["tiny"], run)] == [
        "the environment",
        "the model tiny",
        "the checkpoint of step 8",
    ]
    assert len(groups_for(1, ["tiny"], run)) == 2
    assert len(groups_for(0, [], None)) == 1


# --- freezing: the order of things is the safety --------------------------------------------------------------


def test_the_node_thaws_by_itself_before_it_is_frozen_and_syncs_before_both():
    lines = freeze_command("unit")
    assert lines.index("sync") < lines.index("--on-active=60") < lines.index("fsfreeze --freeze")
    assert "fsfreeze --unfreeze /data" in lines[lines.index("--on-active") :]
    assert thaw_command("unit").index("--unfreeze") < thaw_command("unit").index("unit.timer")
    for command in (lines, thaw_command("unit")):
        subprocess.run(["sh", "-n", "-c", command], check=True)


def test_a_node_without_its_data_disk_is_not_frozen(node, tmp_path):
    done = subprocess.run(
        ["sh", "-c", freeze_command("unit", str(tmp_path))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 9 and "no disk is mounted" in done.stderr
