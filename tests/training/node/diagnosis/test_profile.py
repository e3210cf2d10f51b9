"""Profiles of several ranks become one trace: with real traces of two gloo ranks."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.ports import free_pair
from tests.support.rank_output import outputs as said_by
from training.node.diagnosis.trace import (
    Clock,
    clock_of,
    covered_us,
    events_of,
    merge,
    read_trace,
    shift_us,
    summarise,
    summary_text,
)
from training.run.launch import Host, Launch, LaunchError, launch_text, parse_steps

ROOT = Path(__file__).parents[4]

PROGRAM = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from training.node.diagnosis.on_rank import Profile

number, port, run = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
place = SimpleNamespace(rank=number)
rank = SimpleNamespace(launch={"profile": sys.argv[4]}, place=place, run_dir=run, say=print)
model = torch.nn.Linear(200, 200)
profile = Profile(rank, 0)
for step in range(6):
    model(torch.randn(50, 200)).sum().backward()
    time.sleep(0.2 * number)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    dist.barrier()
    profile.step()
profile.close()
"""


def profiled(run: Path, steps: str) -> list[str]:
    """What two ranks of a run of six steps said."""
    run.mkdir()
    port = free_pair()
    env = {**os.environ, "PYTHONPATH": programs.PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            programs.forked(PROGRAM, rank, port, run, steps),
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = said_by(started, 90)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    hosts = (Host("te1", "10.0.0.1", 1), Host("te2", "10.0.0.2", 1))
    (run / "launch.json").write_text(launch_text(Launch(run.name, str(run), hosts, "m", (), "python", {})))
    return said


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder with two ranks' profiles of three steps, merged."""
    pytest.importorskip("torch", reason="needs the [train] extra")
    run = tmp_path_factory.mktemp("profile") / "run"
    assert "profiled steps 3 to 5" in profiled(run, "3")[0]
    argv = [sys.executable, "-m", "training.node.diagnosis.trace", "--run", str(run)]
    subprocess.run(argv, cwd=ROOT, check=True)
    return run


def merged(run: Path) -> list[dict]:
    with gzip.open(run / "profile" / "trace.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def collectives(events: list[dict], rank: int, name: str) -> list[tuple[float, float]]:
    found = [e for e in events if e["pid"] == rank and e["name"] == name and e["ph"] == "X"]
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in found)


def overlap(events: list[dict]) -> bool:
    both = [collectives(events, rank, "gloo:barrier") for rank in (0, 1)]
    assert len(both[0]) == len(both[1]) == 3
    return all(max(a[0], b[0]) <= min(a[1], b[1]) for a, b in zip(*both, strict=True))


@pytest.mark.torch
def test_the_steps_asked_for_are_in_every_ranks_profile_and_no_others(run: Path):
    for rank in (0, 1):
        events = read_trace(run / "profile" / f"rank-{rank}.json.gz")["traceEvents"]
        assert sum(e["name"].startswith("ProfilerStep#") and e["ph"] == "X" for e in events) == 3
        assert len([e for e in events if e["name"] == "gloo:all_reduce"]) == 6


@pytest.mark.torch
def test_the_merged_trace_has_one_named_process_a_rank_and_every_event_in_its_order(run: Path):
    events = merged(run)
    assert all({"ph", "name", "pid", "tid"} <= event.keys() for event in events)
    assert all("ts" in e and "dur" in e and e["ts"] >= 0 for e in events if e["ph"] == "X")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 (te1)", 1: "rank 1 (te2)"} and {e["pid"] for e in events} == {0, 1}
    for rank in (0, 1):
        whole = read_trace(run / "profile" / f"rank-{rank}.json.gz")["traceEvents"]
        before = [e["name"] for e in whole if e["ph"] == "X" and isinstance(e["pid"], int)]
        assert [e["name"] for e in events if e["pid"] == rank and e["ph"] == "X"] == before
    begins = [e["id"] for e in events if e["ph"] == "s"]
    assert len(begins) == len(set(begins)) > 0  # an arrow never leads from one rank to the other
    assert sorted(begins) == sorted(e["id"] for e in events if e["ph"] == "f")


@pytest.mark.torch
def test_collectives_overlap_with_the_clocks_as_they_are_and_with_one_that_is_seconds_off(run: Path, tmp_path: Path):
    assert overlap(merged(run))
    traces = [read_trace(run / "profile" / f"rank-{rank}.json.gz") for rank in (0, 1)]
    assert shift_us(clock_of(traces[1]), clock_of(traces[0])) == 0
    traces[1]["baseTimeNanoseconds"] += 3_700_000_000
    off = shift_us(clock_of(traces[1]), clock_of(traces[0]))
    assert off == pytest.approx(-3_700_000, abs=5000)
    (tmp_path / "profile").mkdir()
    target = tmp_path / "profile" / "trace.json.gz"
    merge({0: lambda: traces[0], 1: lambda: traces[1]}, "te{}".format, target)
    assert overlap(merged(tmp_path))


@pytest.mark.torch
def test_the_summary_says_where_the_time_went_and_how_much_of_it_was_communication(run: Path):
    lines = (run / "profile" / "summary.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["rank 0", "rank 1"] and "3 steps of" in lines[0]
    assert any(line.endswith("aten::addmm") for line in lines)
    summary = [summarise(read_trace(run / "profile" / f"rank-{r}.json.gz")["traceEvents"]) for r in (0, 1)]
    # rank 1 sleeps before it joins: rank 0 spends that time in the collective
    assert summary[0].communication_us > summary[1].communication_us + 2 * 100_000
    assert all(0 < s.communication_us <= s.wall_us for s in summary)


@pytest.mark.torch
def test_a_run_that_ends_before_the_steps_says_so_and_one_that_ends_among_them_keeps_what_there_is(tmp_path: Path):
    assert "no profile: the run ended after step 6, before step 8" in profiled(tmp_path / "early", "8-9")[0]
    assert not (tmp_path / "early" / "profile").exists()
    assert "profiled steps 6 to 6" in profiled(tmp_path / "among", "6-9")[0]
    assert (tmp_path / "among" / "profile" / "rank-1.json.gz").exists()


def test_steps_are_counted_from_where_the_run_goes_on_or_named():
    assert parse_steps("3") == (3, 5) and parse_steps("3", done=40) == (43, 45) and parse_steps("10-12", 40) == (10, 12)
    for wrong in ("0", "-1", "5-3", "0-2", "1-", "x", "1.5"):
        with pytest.raises(LaunchError, match="--profile"):
            parse_steps(wrong)


def test_clocks_that_the_collectives_contradict_are_left_alone():
    one = Clock(0, 0, {"gloo:barrier": [(0, 10), (100, 110)]})
    assert shift_us(Clock(0, 0, {"gloo:barrier": [(50, 60), (300, 310)]}), one) == 0
    assert shift_us(Clock(0, 0, {"gloo:barrier": [(50, 60)]}), one) == 0  # not the same ones
    assert shift_us(Clock(0, 0, {"gloo:barrier": [(50, 60), (150, 160)]}), one) == -50


def test_a_gpus_streams_become_threads_of_its_rank():
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "GPU"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4711, "tid": 4711, "ts": 1.0, "dur": 5.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 2.0, "dur": 9.0},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            "pid": 0,
            "tid": 20,
            "ts": 4.0,
            "dur": 9.0,
        },
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0.0, "dur": 20.0},
    ]
    moved = list(events_of({"traceEvents": events}, 3, "te4", 100.0))
    assert {event["pid"] for event in moved} == {3}
    assert [e["args"]["name"] for e in moved if e["name"] == "thread_name"] == ["GPU 0 stream 7", "GPU 0 stream 20"]
    kernels = [e for e in moved if e.get("cat") == "kernel"]
    assert [e["ts"] for e in kernels] == [102.0, 104.0] and len({e["tid"] for e in kernels}) == 2
    assert list(clock_of({"traceEvents": events}).collectives) == ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]


def test_self_time_leaves_out_what_was_called_and_overlapping_spans_count_once():
    call = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    events = [call | {"name": "outer", "ts": 0, "dur": 10}, call | {"name": "inner", "ts": 2, "dur": 3}]
    events += [call | {"name": "inner", "ts": 6, "dur": 4}, call | {"name": "outer", "ts": 20, "dur": 1}]
    summary = summarise(events)
    assert summary.self_us == {"outer": 4, "inner": 7} and summary.calls == {"outer": 2, "inner": 2}
    assert "inner" in summary_text({0: summary}).splitlines()[3]
    assert covered_us([(0, 10), (5, 12), (20, 21), (30, 25)]) == 13


def test_a_damaged_profile_is_named(tmp_path: Path):
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    with pytest.raises(LaunchError, match=r"rank-0\.json\.gz cannot be read"):
        read_trace(path)
