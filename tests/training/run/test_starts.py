"""The starts of a run as they are noted and read: what was typed, and for how long all of them went."""

from __future__ import annotations

from dataclasses import replace

from training.run.history import (
    STARTS,
    Loss,
    RunStart,
    lost_in_all,
    note_end,
    note_loss,
    note_start,
    read_starts,
    seconds_of,
)
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
        file.write('{"ended": 1\n{"loss": {"steps": 1, "seconds": "NaN", "cost": null}}\n')
    note_start(tmp_path, LAUNCH, 20.0)
    assert [(start.at, start.loss) for start in read_starts(tmp_path)] == [(10.0, None), (20.0, None)]


def test_what_changes_of_machines_took_is_added_up_and_costs_nothing_known_where_one_has_no_price(tmp_path):
    why = "te2 is lost"
    for at, loss in ((10.0, None), (20.0, Loss(3, 60.0, 0.5)), (30.0, Loss(1, 30.0, 0.25))):
        note_start(tmp_path, LAUNCH, at, why if loss else "")
        if loss:
            note_loss(tmp_path, loss)
        note_end(tmp_path, at + 9)
    starts = read_starts(tmp_path)
    assert [(start.why, start.loss, start.ended) for start in starts[::2]] == [
        ("", None, 19.0),
        (why, Loss(1, 30.0, 0.25), 39.0),
    ]
    assert lost_in_all(starts) == (2, Loss(4, 90.0, 0.75))
    assert lost_in_all([*starts, replace(starts[1], loss=Loss(0, 10.0))]) == (3, Loss(4, 100.0))
    assert lost_in_all(starts[:1]) == (0, Loss(0, 0.0))
