"""A run that hangs ends, and the rank that fell behind is named: from real stacks of real ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.waiting import until
from training.laptop.new_run import launch_files
from training.node.diagnosis.hang import (
    OWN_WAITS,
    RankState,
    StackFrame,
    StallWatch,
    parse_state,
    state_text,
    straggler,
)
from training.node.diagnosis.progress import PREPARE, STEP, Mark, ProgressFile, read_progress
from training.node.diagnosis.stacks import parse_recorder, process_state, short_path
from training.node.supervision.end_processes import processes_of
from training.run.environment import here_env, rank_env
from training.run.events import EVENTS, Started, parse_rows
from training.run.folder import parse_status
from training.run.launch import Host, Launch

ROOT = Path(__file__).parents[4]


def marks(watch: StallWatch, steps: int, step_s: float) -> float:
    """Feed a watch steps of equal length; gives the time after them."""
    for step in range(steps + 1):
        assert watch.take(Mark(step, STEP, 0), step * step_s) is None
    return steps * step_s


def test_a_silence_is_a_hang_after_ten_usual_steps_and_never_before_the_floor():
    short, long = StallWatch(300), StallWatch(300)
    now = marks(short, 8, 2)
    assert short.take(Mark(8, STEP, 0), now + 299) is None
    assert short.take(Mark(8, STEP, 0), now + 301) == 301
    now = marks(long, 8, 60)
    assert long.take(Mark(8, STEP, 0), now + 599) is None
    assert long.take(Mark(8, STEP, 0), now + 601) == 601


def test_steps_of_minutes_do_not_make_the_watch_wait_past_the_collectives_time_out():
    watch = StallWatch(300)
    now = marks(watch, 4, 200)
    assert watch.take(Mark(4, STEP, 0), now + 1501) == 1501
    slow = StallWatch(300)
    now = marks(slow, 4, 900)
    assert slow.take(Mark(4, STEP, 0), now + 2600) is None


def test_loading_and_saving_have_longer_and_what_a_rank_does_alone_has_no_limit():
    watch = StallWatch(300)
    now = marks(watch, 4, 1)
    assert watch.take(Mark(4, "save", 0), now) is None
    assert watch.take(Mark(4, "save", 0), now + 1499) is None
    assert watch.take(Mark(4, "save", 0), now + 1501) == 1501
    preparing = StallWatch(300)
    assert preparing.take(Mark(0, PREPARE, 0), 0) is None
    assert preparing.take(Mark(0, PREPARE, 0), 90_000) is None


def test_a_run_that_may_stand_still_is_never_called_hung():
    watch = StallWatch(0)
    marks(watch, 3, 1)
    assert watch.take(Mark(3, STEP, 0), 1e6) is None


def test_a_rank_overwrites_its_mark_and_a_note_costs_next_to_nothing(tmp_path: Path):
    before = time.time()
    progress = ProgressFile(tmp_path, 3)
    mark = read_progress(tmp_path, 3)
    assert (mark.step, mark.phase) == (0, PREPARE) and round(before, 3) <= mark.at <= round(time.time(), 3)
    began = time.thread_time()  # its own, whatever else the machine does
    for step in range(1000):
        progress.enter(step, STEP)
    assert (time.thread_time() - began) / 1000 < 0.0001
    assert read_progress(tmp_path, 3).step == 999
    assert len((tmp_path / "progress" / "rank-3").read_text().splitlines()) == 1
    assert read_progress(tmp_path, 4) is None


WAITING = (
    StackFrame("wait", "python:threading.py", 320),
    StackFrame("all_reduce", "torch/distributed/distributed_c10d.py", 3252),
    StackFrame("optimizer_step", "training/node/finetune.py", 157),
)
BUSY = (StackFrame("collate", "training/data.py", 88), StackFrame("optimizer_step", "training/node/finetune.py", 140))


def state(rank: int, stack=WAITING, **more) -> RankState:
    return RankState(rank, f"te{rank + 1}", "S", **{"step": 40, "phase": STEP, "stack": stack, **more})


def test_the_rank_outside_the_collective_is_named_with_its_place_in_the_code():
    late = straggler([state(0), state(1, BUSY), state(2)], 312)
    assert (late.rank, late.node) == (1, "te2")
    assert late.sentence == (
        "no step was finished for 312 s: rank 1 on te2 fell behind in step 41 at collate (training/data.py:88); "
        "the others wait in all_reduce"
    )


def test_a_collective_in_a_thread_of_the_backward_pass_counts_as_waiting():
    backward = (StackFrame("_engine_run_backward", "torch/autograd/graph.py", 5),)
    late = straggler([state(0, backward, others=(WAITING,)), state(1, BUSY)], 312)
    assert late.rank == 1


def test_a_stage_that_waits_for_its_neighbour_is_not_the_one_to_blame():
    received = (
        StackFrame("timed", "training/node/metrics/steps.py", 63),
        StackFrame("take", "training/node/strategies/crossing.py", 43),
        StackFrame("gradient", "training/node/strategies/crossing.py", 126),
    )
    three = [state(0, received), state(1, BUSY), state(2)]
    assert straggler(three, 312).rank == 1
    two = straggler([state(0, BUSY), state(1, received)], 312)
    assert two.rank == 0 and two.sentence.endswith("the others wait in a receive from a neighbouring stage")


def test_our_own_waits_are_where_they_are_said_to_be():
    for file, function in OWN_WAITS:
        assert f"def {function}(" in (ROOT / file).read_text(), (file, function)


def test_where_collectives_run_behind_the_programs_back_the_flight_recorder_decides():
    item = (StackFrame("optimizer_step", "training/node/finetune.py", 160),)
    dumps = [
        {"pg_status": {"0": {"last_enqueued_collective": n}, "1": {"last_enqueued_collective": -1}}} for n in (7, 9, 9)
    ]
    assert parse_recorder(dumps[0]) == {"0": 7}
    states = [state(rank, item, enqueued=parse_recorder(dump)) for rank, dump in enumerate(dumps)]
    assert straggler(states, 312).rank == 0


def test_ranks_that_wait_for_different_things_are_told_apart():
    broadcast = (StackFrame("broadcast", "torch/distributed/distributed_c10d.py", 1), WAITING[-1])
    assert straggler([state(0), state(1), state(2, broadcast)], 312).rank == 2
    both = straggler([state(0), state(1)], 312)
    assert both.rank is None and both.sentence.endswith("every rank waits in all_reduce")


def test_a_process_that_is_gone_and_a_lower_step_are_signs_too():
    assert "rank 1 on te2 is gone" in straggler([state(0), replace(state(1), state="?")], 312).sentence
    assert straggler([state(0), state(1, step=39)], 312).rank == 1


def test_source_files_are_named_from_their_package_on():
    assert short_path("/data/runs/x/training/data.py", "/data/runs/x") == "training/data.py"
    assert short_path("/data/env/lib/python3.11/site-packages/torch/cuda/a.py", "/r") == "torch/cuda/a.py"
    assert short_path(json.__file__, "/r") == "python:json/__init__.py"


def test_on_gpus_ranks_keep_a_flight_recorder_that_can_be_asked():
    env = rank_env("/data/runs/x", "cuda")
    assert env["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == env["TORCH_FR_DUMP_TEMP_FILE"] == "/data/runs/x/logs/nccl-trace-"
    assert int(env["TORCH_FR_BUFFER_SIZE"]) > 0
    assert not [name for name in rank_env("/data/runs/x", "cpu") if name.startswith("TORCH_NCCL")]


PROGRAM = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from training.node.diagnosis.progress import STEP, ProgressFile

def read_a_slow_disk():
    time.sleep(600)

def main():
    rank = int(os.environ["RANK"])
    progress = ProgressFile(Path(sys.argv[2]), rank)
    progress.enter(0, "load")
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    for step in range(1000):
        progress.enter(step, STEP)
        if step == 6 and rank == 1:
            read_a_slow_disk()
        dist.all_reduce(torch.ones(4))
        time.sleep(0.3)

if __name__ == '__main__':
    main()
"""


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """A supervised run of three ranks, one of which falls asleep in its seventh step; and a SIGSTOPped rank's state
    from the same ranks, asked while they hang."""
    pytest.importorskip("deepspeed", reason="needs the [train] extra: DeepSpeed's launcher starts the ranks")
    if not Path(sys.executable).with_name("py-spy").exists():
        pytest.skip("needs py-spy")
    folder = tmp_path_factory.mktemp("hang")
    run = folder / "tiny-20260101-000000"
    shutil.copytree(ROOT / "training", run / "training", ignore=shutil.ignore_patterns("__pycache__"))
    (run / "training" / "program.py").write_text(PROGRAM)
    env = here_env(str(run), str(Path(sys.executable).parent), os.environ["PATH"], False, str(folder))
    hosts = (Host("localhost", "127.0.0.1", 3),)
    launch = Launch(run.name, str(run), hosts, "training.program", (), sys.executable, env, here=True, hang_s=5)
    for name, text in launch_files(launch).items():
        (run / name).write_text(text)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "training.node.supervision.supervise", "--run", str(run)], cwd=run
    )
    try:
        reached = lambda: (read_progress(run, 1) or Mark(0, "", 0)).step >= 6  # noqa: E731
        until(lambda: reached() or supervisor.poll() is not None, "the seventh step")
        assert supervisor.poll() is None
        yield run, supervisor
    finally:
        supervisor.kill()
        supervisor.wait()
        for pid in processes_of(str(run)):
            os.kill(pid, signal.SIGKILL)


def pids(run: Path) -> dict[int, int]:
    told = parse_rows((run / EVENTS).read_text())
    return {each.rank: each.event.pid for each in told if isinstance(each.event, Started)}


@pytest.mark.torch
def test_ranks_of_a_run_that_hangs_are_asked_and_the_late_one_is_named(hung):
    run, supervisor = hung
    ranks = pids(run)
    waits = lambda rank: read_progress(run, rank).step == 6 and process_state(ranks[rank]) == "S"  # noqa: E731
    until(lambda: waits(0) and waits(2), "two ranks that wait for the third")
    os.kill(ranks[2], signal.SIGSTOP)  # is seen at once, and can be read although it cannot be paused
    try:
        until(lambda: process_state(ranks[2]) == "T", "the signal")
        words = ",".join(f"{rank}={pid}" for rank, pid in ranks.items())
        argv = [sys.executable, "-m", "training.node.diagnosis.stacks", "--run", str(run), "--ranks", words]
        told = subprocess.run(argv, cwd=run, capture_output=True, text=True, check=True).stdout
    finally:
        os.kill(ranks[2], signal.SIGCONT)
    states = sorted((parse_state(content, "localhost") for content in json.loads(told)), key=lambda s: s.rank)
    assert [s.waits for s in states] == [True, False, True]
    assert "rank 2 on localhost is stopped by a signal in step 7" in straggler(states, 5).sentence
    awake = straggler([*states[:2], replace(states[2], state="S")], 5)
    assert awake.rank == 1 and "read_a_slow_disk (training/program.py:" in awake.sentence
    assert "all_reduce (torch/distributed/distributed_c10d.py:" in state_text(states[0])

    assert supervisor.wait(60) == 1
    status = parse_status((run / "status.json").read_text())
    assert (status.state, status.failed_rank, status.failed_node) == ("failed", 1, "localhost")
    line = PROGRAM.splitlines().index("    time.sleep(600)") + 1
    assert (
        f"rank 1 on localhost fell behind in step 7 at read_a_slow_disk (training/program.py:{line})" in status.reason
    )
    assert "the others wait in all_reduce" in status.reason
    folder = run / status.reason.rpartition("; stacks: ")[2]
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.txt", "rank-1.txt", "rank-2.txt"]
    assert "read_a_slow_disk" in (folder / "rank-1.txt").read_text()
    assert processes_of(str(run)) == []
