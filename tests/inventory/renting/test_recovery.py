"""Where machines of a cluster are gone: which, and which command restores what from a snapshot or a kept disk."""

import pytest

from deploy.survey import survey
from inventory.cluster import load_cluster
from inventory.renting import down, tags
from inventory.renting.intents import Intents
from inventory.renting.recovery import rented_nodes
from inventory.renting.report import show_machines
from inventory.setting_types import SettingsError
from inventory.ssh import SshError
from tests.support.paper_cluster import SMALL, PaperCluster
from tests.support.run_folders import make_run
from training.laptop.head_node import HereHead
from training.laptop.workload import TrainingWorkload


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def snapshot_of(cluster, name):
    """The id of a whole snapshot of the head's disk."""
    (disk,) = cluster.data_disks
    snapshot_id = cluster.cloud.create_snapshot(disk.disk_id, name, tags.of_cluster("demo"), name)
    cluster.api.cloud.account.clock_offset_s += 3600
    return snapshot_id


def ended(done, code):
    """What was said by a command that ended with a code."""
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_where_only_a_snapshot_is_left_every_command_names_it_and_up_says_that_it_restores_nothing(cluster):
    cluster.up(1)
    snapshot_id = snapshot_of(cluster, "evening")
    cluster.down(disks=True)
    left = f"snapshot {snapshot_id} (evening, "
    for argv in (["status"], ["doctor"], ["ssh"], ["snapshots.create"]):
        said = ended(cluster.fab(*argv), 2)
        assert f"the cluster 'demo' has no machines in cn-hangzhou; {left}" in said
        assert "is there: fab rebuild restores it; fab up starts from nothing" in said
    cost = ended(cluster.fab("cost"), 0)
    assert f"has no machines in cn-hangzhou; {left}" in cost and "a month (fab snapshots.prune --all)" in cost
    said = " ".join(ended(cluster.fab("up", "--nodes", "1", "--dry"), 0).split())
    assert f"te1 starts with an empty data disk although {left}" in said
    assert "is there: fab up restores nothing of it, fab rebuild does" in said
    cluster.up(1)
    said = " ".join(ended(cluster.fab("rebuild", "--nodes", "1", "--dry"), 0).split())
    (blank,) = cluster.data_disks
    assert f"te1 has {blank.disk_id}, which was not made from {snapshot_id}: this rebuild restores no run" in said
    assert f"fab down --disks, then fab rebuild --snapshot {snapshot_id}" in said
    assert "starts with an empty" not in cluster.fab("up", "--dry").stdout, "the head is there"


def test_a_kept_disk_is_named_and_beside_it_a_snapshot_of_another(cluster):
    cluster.up(1)
    first = snapshot_of(cluster, "first")
    cluster.down()
    (kept,) = cluster.data_disks
    said = ended(cluster.fab("status"), 2)
    assert f"te1's data disk {kept.disk_id} is kept: fab rebuild makes the machines with it" in said
    assert first not in cluster.fab("up", "--nodes", "1", "--dry").stdout, "all of it is on the disk"
    cluster.cloud.delete("disk", [kept.disk_id])
    cluster.up(1)
    cluster.down()
    (blank,) = cluster.data_disks
    other = (
        f"is of another disk: fab down --disks, which deletes {blank.disk_id} with all that is on it, then fab rebuild"
    )
    assert other in ended(cluster.fab("status"), 2)
    assert other in " ".join(ended(cluster.fab("up", "--nodes", "1", "--dry"), 0).split())


def test_a_stopped_machine_is_known_and_a_stopped_head_is_refused(cluster):
    cluster.up(2)
    one, two = (cluster.machines[f"demo-te{k}"] for k in (1, 2))
    cluster.cloud.call("StopInstances", {"RegionId": "cn-hangzhou", "InstanceId": [two.instance_id]})
    assert [node.stopped for node in rented_nodes(cluster.cloud, cluster.settings)] == [False, True]
    cluster.cloud.call("StopInstances", {"RegionId": "cn-hangzhou", "InstanceId": [one.instance_id]})
    with pytest.raises(SettingsError):
        rented_nodes(cluster.cloud, cluster.settings)


def test_snapshots_that_cannot_be_asked_for_hide_no_sentence(cluster):
    cluster.api.fault("DescribeSnapshots", "error-500", times=99)
    with pytest.raises(SettingsError, match=r"has no machines in cn-hangzhou; rent them: fab up\nwhat else"):
        rented_nodes(cluster.cloud, cluster.settings)
    (note,) = cluster.plan(1).notes
    assert note.startswith("whether there is a snapshot that fab rebuild would restore is not known: ")


def test_status_says_which_machine_is_missing_beside_those_that_stand(cluster, capsys):
    cluster.write(SMALL + "nodes = 3\n")
    cluster.up(3)
    show_machines(cluster.settings)
    assert "is not; runs go on" not in capsys.readouterr().out
    down.remove(cluster.cloud, [cluster.machines["demo-te2"].instance_id], Intents(cluster.places.intents))
    show_machines(cluster.settings)
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of the 3 machines that cluster.toml wants are there, te2 is not; runs go on with 2 machines: " in said
    assert "fab rebuild makes te2 from the newest snapshot" in said


def test_what_the_doctor_is_given_names_the_missing_machine(cluster, monkeypatch):
    cluster.write(SMALL + "nodes = 2\n")
    cluster.up(1)
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(cluster.toml))
    monkeypatch.setattr("deploy.survey.connect", refused)
    assert survey(load_cluster(), []).lacking.names == ("te2",)


def refused(node, *_):
    """No machine on paper answers."""
    raise SshError(f"{node.name}: refused")


class HereAsRemote(HereHead):
    """The head's folder of runs on this machine."""

    def close(self):
        pass


def test_after_a_rebuild_the_trainings_on_the_head_are_read_and_a_silent_head_is_no_failure(
    cluster, tmp_path, monkeypatch
):
    cluster.up(1)
    make_run(tmp_path / "runs", "tiny-20261121-101500", state="finished", steps=(4,))
    make_run(tmp_path / "runs", "check-20261121-121500", state="finished")
    monkeypatch.setattr("training.laptop.head_node.RemoteHead", lambda node: HereAsRemote(tmp_path / "runs"))
    assert TrainingWorkload().trainings(cluster.cloud, cluster.settings) == [("tiny-20261121-101500", "finished")]
    monkeypatch.setattr(HereAsRemote, "ask", refused)
    assert TrainingWorkload().trainings(cluster.cloud, cluster.settings) is None
