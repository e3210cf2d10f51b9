"""Whose data disk it is: written by the base deploy, read before a run starts."""

from pathlib import Path

import pytest

from tests.support.heads import HeadOver, cluster_of, node
from training.laptop import start_lock
from training.laptop.open_cluster import Session
from training.run.launch import LaunchError
from training.run.notices import RECORD, DiskRecord, next_record, parse_record, record_text


def test_a_blank_disk_is_the_first_generation_and_stays_it_wherever_it_goes():
    first = next_record(None, "demo", "a")
    assert first.generation == 1 and next_record(first, "demo", "a") == first


def test_a_disk_from_a_snapshot_is_the_next_generation_and_names_its_source():
    made = next_record(DiskRecord("demo", ("a",)), "demo", "b")
    assert made == DiskRecord("demo", ("a", "b")) and made.generation == 2


def test_another_cluster_takes_a_disk_over_by_its_base_deploy():
    assert next_record(DiskRecord("other", ("a",)), "demo", "a") == DiskRecord("demo", ("a",))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cluster": "demo"}', '{"cluster": "demo", "disks": []}', "null"])
def test_what_is_no_record_is_none(text):
    assert parse_record(text) is None


def test_a_record_is_read_as_it_was_written():
    record = DiskRecord("demo", ("a", "b"))
    assert parse_record(record_text(record)) == record


def cluster(tmp_path: Path, record: DiskRecord | None, disk: str) -> Session:
    if record:
        (tmp_path / RECORD).write_text(record_text(record))
    return cluster_of(HeadOver(runs=tmp_path / "runs"), [node(disk=disk)], name="demo")


def test_runs_start_on_the_clusters_own_disk_and_on_one_of_an_earlier_version(tmp_path):
    start_lock.refuse_other_disk(cluster(tmp_path, None, disk="b"))
    mine = cluster(tmp_path, DiskRecord("demo", ("a", "b")), disk="b")
    start_lock.refuse_other_disk(mine)
    assert start_lock.disk_record(mine.head) == DiskRecord("demo", ("a", "b"))


def test_no_run_starts_on_another_clusters_disk(tmp_path):
    with pytest.raises(LaunchError, match=r"/data on te1 is of the cluster 'other', not 'demo'; run the base deploy"):
        start_lock.refuse_other_disk(cluster(tmp_path, DiskRecord("other", ("a",)), disk="a"))


def test_no_run_starts_on_a_disk_that_came_after_the_base_deploy(tmp_path):
    with pytest.raises(LaunchError, match="has the data disk b, but its /data is set up as a; run the base deploy"):
        start_lock.refuse_other_disk(cluster(tmp_path, DiskRecord("demo", ("a",)), disk="b"))
