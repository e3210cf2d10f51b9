"""The starts of a run as they are noted and read: what was typed, and for how long all of them went."""

from __future__ import annotations

from dataclasses import replace

from training.run.history import STARTS, RunStart, elsewhere, note_end, note_start, read_starts, seconds_of
from training.run.launch import Launch

LAUNCH = Launch("tiny-20260101-000000", "", (), "training.node.finetune", (), "python", {}, command="fab train")


def test_each_start_is_read_with_its_command_and_its_end(tmp_path):
    assert read_starts(tmp_path) == []
    note_start(tmp_path, LAUNCH, 10.0)
    note_end(tmp_path, 15.0)
    note_start(tmp_path, replace(LAUNCH, command="fab train --data '数据.jsonl'"), 20.0)
    first, second = read_starts(tmp_path)
    hosts = tuple(host.name for host in LAUNCH.hosts)
    assert (first, second) == (
        RunStart(10.0, "fab train", 15.0, hosts),
        RunStart(20.0, "fab train --data '数据.jsonl'", hosts=hosts),
    )


def test_a_start_whose_supervisor_was_lost_counts_no_time_and_the_last_one_until_now():
    starts = [RunStart(0.0, "a", 5.0), RunStart(10.0, "b"), RunStart(20.0, "c")]
    assert seconds_of(starts, until=27.0) == 12.0
    assert seconds_of([], until=27.0) == 0


def test_a_line_that_was_cut_hides_no_other(tmp_path):
    note_start(tmp_path, LAUNCH, 10.0)
    with (tmp_path / STARTS).open("a") as file:
        file.write('{"ended": 1\n')
    note_start(tmp_path, LAUNCH, 20.0)
    assert [start.at for start in read_starts(tmp_path)] == [10.0, 20.0]


def test_the_same_machines_in_another_order_are_no_others():
    def on(*hosts):
        return RunStart(0.0, "fab train", hosts=hosts)

    assert elsewhere([on("te1", "te2", "te3"), on("te2", "te1"), on("te1", "te2")]) == [(1, ("te1", "te2", "te3"))]
    assert elsewhere([on("te1"), on()]) == elsewhere([]) == []
