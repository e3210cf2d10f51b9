"""What the numbers of a communication check mean."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from training.laptop.preparing import check_report, fetched_results
from training.run.comm_report import (
    busbw_gbyte_s,
    comparison,
    pair_table,
    parse_result,
    problems,
    slowest_pair,
    this_and_previous,
    wrong_results,
)

NAMES = ("te1", "te2", "te3")
RESULT = {
    "run_id": "check-20260131-154500",
    "cluster": "spotune",
    "time": 200.0,
    "backend": "gloo",
    "world_size": 3,
    "nodes": [
        {"rank": n, "node": name, "interface_expected": "eth0", "interfaces_used": {"eth0": 4}}
        for n, name in enumerate(NAMES)
    ],
    "checks": [{"operation": "all-reduce", "dtype": "float32", "ok": True, "detail": ""}],
    "pairs": [{"from": a, "to": b, "gbit_s": 10.0, "latency_us": 50.0} for a in NAMES for b in NAMES if a != b],
    "sweep": [
        {"operation": "all_reduce", "bytes": 1024, "seconds": 1.0, "algbw_gbyte_s": 0.75, "busbw_gbyte_s": 1.0},
    ],
}


def changed(**values):
    return {**copy.deepcopy(RESULT), **values}


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),  # 2 (n - 1) / n, doc/PERFORMANCE.md of nccl-tests
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_busbw_is_as_nccl_tests_defines_it(operation: str, factor: float):
    assert busbw_gbyte_s(operation, 2_000_000_000, 0.5, 4) == pytest.approx(4.0 * factor)


def test_a_good_result_has_no_problems():
    assert problems(RESULT) == []
    assert problems(RESULT, line_rate_gbps=12) == []


def test_the_slow_direction_of_a_link_is_named():
    result = changed()
    result["pairs"][3]["gbit_s"] = 1.0
    slow = slowest_pair(result)
    assert slow is not None
    assert (slow["from"], slow["to"]) == ("te2", "te3")
    assert problems(result) == ["te2 -> te3 is slow: 1.00 Gbit/s where the median pair has 10.00"]


def test_links_far_below_the_line_rate_are_named():
    assert problems(RESULT, line_rate_gbps=25) == ["te1 -> te2 reaches 10.00 of 25 Gbit/s line rate"]


def test_the_wrong_interface_is_named_with_its_node():
    result = changed()
    result["nodes"][1]["interfaces_used"] = {"docker0": 3, "eth0": 1}
    assert problems(result) == ["te2 talks over docker0 instead of eth0"]


def test_wrong_results_come_first():
    check = {
        "operation": "all-gather",
        "dtype": "int64",
        "ok": False,
        "detail": "1 of 9 elements wrong on rank 2",
    }
    result = changed(checks=[check])
    result["nodes"][0]["interfaces_used"] = {"eth1": 1}
    assert wrong_results(result)
    assert problems(result)[0].startswith("all-gather in int64 gives wrong results: 1 of 9")


def test_what_got_slower_since_last_time_is_named():
    now = changed(sweep=[{**RESULT["sweep"][0], "busbw_gbyte_s": 0.5}])
    now["pairs"][0]["gbit_s"] = 5.0
    assert comparison(now, RESULT) == [
        "all_reduce busbw: 0.50 GB/s, 1.00 last time (-50%)",
        "te1 -> te2: 5.00 Gbit/s, 10.00 last time (-50%)",
    ]


def test_checks_of_other_clusters_are_not_compared():
    nodes = [{**node, "node": f"other-{node['node']}"} for node in RESULT["nodes"]]
    older = changed(run_id="a", time=1.0)
    for other in ({"cluster": "other"}, {"nodes": nodes}, {"backend": "nccl"}, {"world_size": 6}):
        found = this_and_previous([older, changed(run_id="b", time=2.0, **other), RESULT], RESULT["run_id"])
        assert found == (RESULT, older), other
        assert this_and_previous([changed(run_id="b", time=2.0, **other), RESULT], RESULT["run_id"])[1] is None
    assert comparison(RESULT, None) == ["no earlier check of these nodes to compare with"]


def test_a_result_that_cannot_be_read_is_left_out_with_a_word(tmp_path: Path):
    texts = {"1": json.dumps(RESULT), "2": '{"run_id": "cut', "3": '{"run_id": "of another version"}', "4": "[]"}
    for time, text in texts.items():
        folder = tmp_path / f"check-20260131-15450{time}"
        folder.mkdir()
        (folder / "result.json").write_text(text)
    results, unreadable = fetched_results(tmp_path)
    assert results == [RESULT]
    assert [phrase.split()[0] for phrase in unreadable] == [
        str(tmp_path / f"check-20260131-15450{time}" / "result.json") for time in (2, 3, 4)
    ]
    assert "it lacks backend" in unreadable[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time": None}, "time is None, and no number from 0 up"),
        ({"time": "1"}, "time is '1', and no number from 0 up"),
        ({"world_size": True}, "world_size is True, and no number from 0 up"),
        ({"pairs": {}}, "its pairs are no list of rows"),
        ({"pairs": [{"from": "te1", "gbit_s": 1.0}]}, "pairs: to is None, and no text"),
        ({"pairs": [{"from": "te1", "to": "te2", "gbit_s": float("nan")}]}, "pairs: gbit_s is nan, and no number"),
        ({"sweep": [{**RESULT["sweep"][0], "busbw_gbyte_s": -1}]}, "sweep: busbw_gbyte_s is -1, and no number"),
        ({"sweep": [7]}, "its sweep are no list of rows"),
        ({"checks": [{**RESULT["checks"][0], "ok": "yes"}]}, "checks: ok is 'yes', and no true or false"),
        ({"nodes": [{"rank": 0}]}, "nodes: node is None, and no text"),
    ],
)
def test_a_result_with_what_cannot_be_is_none(change, said: str):
    assert parse_result(json.dumps(RESULT)) == RESULT
    with pytest.raises(ValueError, match=f"^{said}"):
        parse_result(json.dumps(changed(**change)))


def test_the_newest_earlier_check_is_the_one_to_compare_with():
    older, newer = changed(run_id="a", time=1.0), changed(run_id="b", time=2.0)
    later = changed(run_id="c", time=300.0)
    assert this_and_previous([older, newer, RESULT, later], RESULT["run_id"]) == (RESULT, newer)


def test_the_pair_table_reads_from_row_to_column():
    result = changed()
    result["pairs"][0]["gbit_s"] = 7.0
    header, rows = pair_table(result)
    assert header[1:] == list(NAMES)
    assert rows[0] == ["te1", "-", "7.00", "10.00"]


def test_the_report_has_a_table_of_interfaces_of_pairs_and_of_sizes(capsys):
    check_report({**RESULT, "seconds": 2.0}, None, None)
    words = capsys.readouterr().out
    assert "used" in words and "eth0" in words, "each node's interface"
    assert "te2" in words and "10.00" in words and "all_reduce" in words
