"""Removing a cluster: what goes, what stays and what that costs, and that nothing else is left."""

import dataclasses
from datetime import timedelta

import pytest

from inventory.aliyun_ecs.client import Ecs
from inventory.cloud.errors import CloudError, Kind, NoCloud, RentError
from inventory.cloud.values import CLUSTER_TAG, NewDisk
from inventory.renting import down, elsewhere, ledger, report, tags
from tests.support.paper_cluster import FAST, SMALL, PaperCluster


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def left(cluster):
    """What the cloud still bills: machines, disks of any kind."""
    world = cluster.api.cloud.account
    return [*world.instances, *world.disks]


def test_machines_and_their_disks_go_and_the_heads_disk_stays_with_its_price(cluster):
    cluster.up(2)
    plan = cluster.down()
    assert [i.name for i in plan.machines] == ["demo-te1", "demo-te2"]
    (kept,) = plan.kept
    assert left(cluster) == [kept.disk_id]
    lines = list(report.down_lines(plan, cluster.settings))
    assert sum(line.startswith("delete") for line in lines) == 4, "machines, a disk, the key pair"
    (stays,) = [line for line in lines if line.startswith("stays")]
    assert "data disk of te1" in stays and kept.disk_id in stays and f"{plan.disk_months[kept.disk_id]:.2f}" in stays


def test_a_kept_disk_says_since_when_it_costs_by_itself(cluster):
    cluster.up(1)
    (there,) = cluster.data_disks
    assert there.detached is None
    cluster.api.hurry(7200)
    cluster.down()
    (kept,) = cluster.data_disks
    assert kept.detached - kept.created > timedelta(hours=1.9)
    said = cluster.fab("cost").stdout
    assert "for disks without a machine until the month ends" in said


def test_with_its_disks_nothing_is_left(cluster):
    cluster.up(2)
    cluster.down(disks=True)
    assert left(cluster) == []


def test_kept_disks_can_go_later_and_again_is_no_error(cluster):
    cluster.up(1)
    cluster.down()
    assert cluster.down().is_empty
    plan = cluster.down(disks=True)
    assert not plan.machines and len(plan.disks) == 1
    assert left(cluster) == []


def test_a_disk_that_no_machine_ever_had_goes_too(cluster):
    own = tags.of_cluster("demo") | {tags.NODE_TAG: "te2", tags.STATE_TAG: tags.NEW}
    cluster.cloud.create_disk("cn-hangzhou-h", NewDisk("cloud_essd", 20, "PL1", name="demo-te2-data"), own, "t-1")
    plan = cluster.down()
    assert len(plan.disks) == 1 and left(cluster) == []


def test_what_is_somebody_elses_is_not_touched(cluster):
    other = NewDisk("cloud_essd", 20, "PL1", name="demo-te1-data")
    disk_id = cluster.cloud.create_disk("cn-hangzhou-h", other, tags.of_cluster("other"), "t-2")
    cluster.up(1)
    plan = cluster.down(disks=True)
    assert disk_id not in [d.disk_id for d in plan.disks]
    assert left(cluster) == [disk_id]


def test_what_was_given_to_another_cluster_is_neither_deleted_nor_taken_for_gone(cluster):
    (machine,) = cluster.up(1)
    (data,) = cluster.data_disks
    cluster.cloud.tag("instance", [machine.instance_id], tags.of_cluster("other"))
    for disks in (False, True):
        plan = cluster.down(disks=disks)
        assert not plan.machines and not plan.disks and not plan.kept
        told = [line for line in plan.elsewhere if machine.instance_id in line]
        assert len(told) == 1 and 'name = "other"' in told[0]
    assert "elsewhere" in cluster.fab("down").stdout.splitlines()[-1]
    assert {machine.instance_id, data.disk_id} <= set(left(cluster))
    assert [e.ended for e in ledger.Ledger.of(cluster.cloud, cluster.settings).read().values()] == [None, None]


@pytest.mark.parametrize(("value", "kind"), [("", "disk"), ("Demo", "instance"), ("demo ", "disk"), ("", "instance")])
def test_what_has_a_tag_that_names_no_cluster_is_deleted_by_its_id(cluster, value, kind):
    (machine,) = cluster.up(1)
    ids = {"instance": [machine.instance_id], "disk": [disk.disk_id for disk in cluster.data_disks]}[kind]
    cluster.cloud.tag(kind, ids, {CLUSTER_TAG: value})
    if kind == "instance":
        with pytest.raises(RentError, match=machine.instance_id):
            cluster.plan(1)
    plan = cluster.down(disks=True)
    assert [i.instance_id for i in plan.machines] == [machine.instance_id]
    assert left(cluster) == []


def test_what_bills_in_another_region_is_named_and_nothing_is_taken_for_gone(cluster):
    (machine,) = cluster.up(1)
    (disk,) = cluster.data_disks
    cluster.write(SMALL + 'region = "cn-beijing"')
    for command in (("down", "--disks", "--yes"), ("cost",)):
        told = cluster.fab(*command).stdout
        for each in (machine.instance_id, disk.disk_id):
            (line,) = [line for line in told.splitlines() if line.startswith("elsewhere") and each in line]
            assert "in cn-hangzhou of account 1000000000000001: billed" in line and 'region = "cn-hangzhou"' in line
        assert "nothing is left in cn-beijing; elsewhere there is what is named above" in told or command == ("cost",)
    cluster.write(SMALL)
    plan = cluster.down(disks=True)
    assert [i.instance_id for i in plan.machines] == [machine.instance_id] and plan.elsewhere == ()
    cluster.write(SMALL + 'region = "cn-beijing"')
    assert cluster.fab("down").stdout.endswith("\nnothing is left in cn-beijing\n")


def test_another_account_of_the_same_region_is_another_place(cluster):
    cluster.up(1)
    cluster.down()
    world = cluster.api.cloud.account
    world.account_id = "2000000000000002"
    disks, world.disks = world.disks, {}
    cluster.down()
    (left,) = [each.entry for each in elsewhere.billed_elsewhere(cluster.cloud, cluster.settings)]
    assert (left.kind, left.region, left.account) == ("disk", "cn-hangzhou", "1000000000000001")
    world.account_id, world.disks = "1000000000000001", disks
    cluster.down(disks=True)
    assert cluster.down().elsewhere == ()


@pytest.mark.parametrize("kind", ["lost-answer", "throttle", "error-500"])
@pytest.mark.parametrize("action", ["DeleteInstances", "DeleteDisk", "DescribeInstances", "DescribeDisks"])
def test_a_fault_of_the_wire_leaves_nothing_behind(cluster, action, kind):
    cluster.up(1)
    cluster.api.fault(action, kind)
    cluster.down(disks=True)
    assert left(cluster) == []


def test_what_could_not_be_removed_is_an_error_and_the_next_call_goes_on(cluster):
    cluster.up(2)
    cluster.api.fault("DeleteInstances", "error-500", times=50)
    with pytest.raises(CloudError):
        cluster.down(disks=True)
    cluster.api.faults.clear()
    cluster.down(disks=True)
    assert left(cluster) == []


def test_the_host_keys_and_the_key_pair_of_what_is_gone_are_forgotten(cluster):
    (machine,) = cluster.up(1)
    assert machine.private_address in cluster.places.known_hosts.read_text()
    assert cluster.cloud.key_pair(machine.key_pair)
    cluster.down()
    assert cluster.places.known_hosts.read_text() == ""
    assert not cluster.cloud.key_pair(machine.key_pair)


def test_what_machines_cost_is_remembered_after_they_are_gone(cluster):
    cluster.up(2)
    cluster.down(disks=True)
    told = cluster.fab("cost").stdout
    assert "no machines in cn-hangzhou" in told
    assert told.count("ecs.local.small") == 2, "past machines of this month"


def test_fab_down_asks_first_and_without_a_terminal_does_nothing(cluster):
    cluster.up(1)
    done = cluster.fab("down")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "fab down --yes" in done.stderr and "delete  te1" in done.stdout
    assert "fab down --disks --yes" in cluster.fab("down", "--disks").stderr
    assert cluster.machines


def test_fab_down_says_what_is_left(cluster):
    cluster.up(1)
    assert cluster.fab("down", "--yes").returncode == 2, "nobody knows what runs there"
    assert len(cluster.machines) == 1
    done = cluster.fab("down", "--yes", "--force")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "nothing that is billed is left but what stays in cn-hangzhou"
    done = cluster.fab("down", "--yes", "--disks")
    assert done.stdout.splitlines()[-1] == "nothing is left in cn-hangzhou"
    assert left(cluster) == []


def test_one_machine_is_named_and_does_not_go_while_nobody_knows_what_runs_there(cluster):
    cluster.up(3)
    done = cluster.fab("down", "te3", "--yes")
    assert done.returncode == 2 and len(cluster.machines) == 3
    assert done.stderr.startswith("whether a run is going on there is not known: te1 ")
    assert done.stderr.endswith("nothing was deleted (--force: all the same)\n")
    assert "fab down te3 --force --yes" in cluster.fab("down", "te3", "--force").stderr
    done = cluster.fab("down", "te3", "--force", "--yes")
    assert done.returncode == 0 and sorted(cluster.machines) == ["demo-te1", "demo-te2"], done.stderr
    assert done.stdout.splitlines()[-1].startswith("remain  te1, te2: ")


def test_without_a_cluster_fab_down_says_so(cluster):
    done = cluster.fab("down")
    assert (done.returncode, done.stdout) == (0, "account ...0001\nnothing is left in cn-hangzhou\n")


def test_with_another_name_the_local_cloud_that_runs_is_named(cluster):
    bob = cluster.settings.model_copy(update={"name": "bob"})
    with pytest.raises(RentError, match="of the cluster 'demo'; start one for 'bob'") as refused:
        Ecs.open(bob)
    assert isinstance(refused.value, NoCloud)


def test_a_cloud_that_does_not_run_is_one_sentence(cluster):
    cluster.write(SMALL + 'zones = ["cn-hangzhou-h"]')
    (cluster.folder / "state" / "spotune" / "localcloud" / "demo" / "api.json").unlink()
    done = cluster.fab("down", "--yes")
    assert (done.returncode, done.stderr) == (
        2,
        "the local cloud that cluster.toml names does not run: fab local.serve\n",
    )


def test_a_key_that_may_not_list_is_refused_instead_of_told_that_nothing_is_there(cluster):
    cluster.up(2)
    for action in ("DescribeInstances", "DescribeDisks"):
        cluster.api.fault(action, "no-permission", times=0)
        with pytest.raises(CloudError, match=f"may not list .* ecs:{action}") as refused:
            cluster.down()
        assert refused.value.kind is Kind.AUTH
        with pytest.raises(CloudError, match=f"may not list .* ecs:{action}"):
            cluster.up(2)
        cluster.api.faults.clear()
    assert len(cluster.machines) == 2 and len(cluster.calls("RunInstances")) == 1


def test_machines_that_lost_their_tags_are_found_by_their_ids(cluster):
    cluster.up(2)
    for each in cluster.api.cloud.account.instances.values():
        each.tags = {}
    plan = cluster.down(disks=True)
    (note,) = plan.notes
    assert len(plan.machines) == 2 and all(each.instance_id in note for each in plan.machines)
    assert left(cluster) == []


def test_a_snapshot_that_is_still_being_stored_is_not_destroyed(cluster):
    cluster.up(1)
    (disk,) = cluster.data_disks
    snapshot_id = cluster.cloud.create_snapshot(disk.disk_id, "evening", tags.of_cluster("demo"), "token-of-a-snapshot")
    for disks in (False, True):
        with pytest.raises(RentError, match=rf"{snapshot_id} .* of te1's disk is \d+ % stored .* --anyway"):
            cluster.down(disks)
    assert cluster.machines
    cluster.api.hurry(600)
    cluster.down()
    assert [s.status for s in cluster.cloud.snapshots(ids=[snapshot_id])] == ["accomplished"]


def test_a_snapshot_of_a_disk_that_stays_without_a_machine_does_not_hold_fab_down_up(cluster):
    cluster.up(1)
    (disk,) = cluster.data_disks
    cluster.down()
    cluster.cloud.create_snapshot(disk.disk_id, "evening", tags.of_cluster("demo"), "token-of-a-snapshot")
    assert cluster.down().is_empty
    with pytest.raises(RentError, match="te1's disk"):
        cluster.down(disks=True)
    assert down.plan_down(cluster.cloud, cluster.settings, disks=True, anyway=True).disks


def test_a_disk_that_its_machine_lets_go_of_late_is_deleted_all_the_same(cluster):
    cluster.up(1)
    shown = iter(["i-lets-go"])
    original = Ecs.disks

    def disks(self, **asked):
        if not cluster.api.cloud.account.instances and (late := next(shown, "")):
            return tuple(dataclasses.replace(d, instance_id=late) for d in original(self, **asked))
        return original(self, **asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ecs, "disks", disks)
        cluster.down(disks=True)
    assert next(shown, None) is None and left(cluster) == []


def test_what_is_left_of_a_down_with_disks_is_removed_by_the_command_that_is_named(cluster):
    cluster.up(1)
    cluster.down()
    quick = Ecs.open(cluster.settings, pace=dataclasses.replace(FAST, patience=0.002))
    plan = down.plan_down(quick, cluster.settings, disks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ecs, "delete_disk", lambda self, disk_id: None)
        with pytest.raises(CloudError, match="again: fab down --disks"):
            down.apply_down(quick, cluster.settings, plan, print)


def test_disks_that_came_together_are_named_after_their_machines(cluster):
    cluster.up(3)
    plan = down.plan_down(cluster.cloud, cluster.settings, disks=True)
    lines = [line for line in report.down_lines(plan, cluster.settings) if "data disk" in line]
    assert sorted(line.split("  ")[1] for line in lines) == [f"data disk of te{k}" for k in (1, 2, 3)]


def test_what_the_cloud_answers_can_be_recorded_without_what_it_tells_about_its_owner(cluster):
    folder = cluster.folder / "answers"
    for argv in (["up", "--nodes", "1", "--dry"], ["cost"], ["down"]):
        done = cluster.fab(*argv, "--record", folder / argv[0])
        assert done.returncode == 0, done.stderr
        recorded = [path.read_text() for path in (folder / argv[0]).glob("Describe*-001.json")]
        assert recorded and not any(cluster.api.access_key_id in text for text in recorded)
    (folder / "file").touch()
    refused = cluster.fab("cost", "--record", folder / "file")
    assert (refused.returncode, refused.stderr) == (
        2,
        f"--record {folder / 'file'}: no folder can be made there: File exists\n",
    )
