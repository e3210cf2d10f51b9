"""No rank is left behind when another falls silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.ports import free_pair
from training.node.heartbeat import LIMIT_S, START_S, Heartbeat, HeartbeatPlace, late_ranks
from training.text.problems import PEER_LOST


def test_a_rank_is_late_once_its_last_beat_is_older_than_the_limit():
    beats = {0: 100.0, 1: 70.0, 2: 69.9}
    assert late_ranks(beats, world_size=3, started=0, now=100.0) == [2]
    assert LIMIT_S == 30


def test_a_rank_that_never_came_is_late_only_after_the_start_has_had_its_time():
    assert late_ranks({0: START_S}, world_size=2, started=0, now=START_S) == []
    assert late_ranks({0: START_S}, world_size=2, started=0, now=START_S + 1) == [1]


def test_a_single_rank_opens_no_store():
    heartbeat = Heartbeat(HeartbeatPlace(0, 0, 1, "te1", "127.0.0.1", 1), lambda reason: None)
    heartbeat.start()
    heartbeat.fail("nobody hears this")
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("heartbeat")] == []


SCRIPT = """
import signal, sys, torch.distributed
from training.node import heartbeat
rank, port = int(sys.argv[1]), int(sys.argv[2])
say = lambda failed: print(failed.follows, failed.peer, failed.reason, flush=True)
heartbeat.BEAT_S = 0.2  # far below the limit, so that a busy machine makes nobody late
class Loud(heartbeat.Heartbeat):
    def _hear(self, beats):
        super()._hear(beats)
        print(*sorted(beats), "beat", flush=True)
heartbeat = Loud(heartbeat.HeartbeatPlace(rank, 0, 2, f"te{rank + 1}", "127.0.0.1", port), say, limit_s=4)
print("up", flush=True)
heartbeat.start()
if sys.argv[3:] == ["fail"]:
    heartbeat.fail("disk on fire")
    sys.exit(1)
signal.pause()
"""


@pytest.fixture
def ranks():
    """Two ranks that only beat, as processes; ended afterwards."""
    pytest.importorskip("torch", reason="needs the [train] extra")
    port, started = free_pair(), []

    def start(*second_rank):
        for rank, extra in enumerate(((), second_rank)):
            command = [sys.executable, "-c", SCRIPT, str(rank), str(port), *extra]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(command, cwd=Path(__file__).parents[3], **pipes))
        for process in started:
            assert process.stdout.readline() == "up\n"
        if not second_rank:
            while started[0].stdout.readline() != "0 1 beat\n":
                assert started[0].poll() is None
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("victim", "how", "sentence"),
    [
        (0, signal.SIGKILL, "False 0 rank 0 on 127.0.0.1 is gone; leaving"),
        (0, signal.SIGSTOP, "False 0 the head has not answered for"),
        (1, signal.SIGSTOP, "False 1 rank 1 (te2) has been silent for"),
    ],
)
def test_the_other_rank_leaves_and_says_who_fell_silent(ranks, victim, how, sentence):
    processes = ranks()
    os.kill(processes[victim].pid, how)
    output, _ = processes[1 - victim].communicate(timeout=120)
    assert processes[1 - victim].returncode == PEER_LOST
    assert sentence in output


@pytest.mark.torch
def test_a_failing_rank_tells_the_others_why(ranks):
    processes = ranks("fail")
    output, _ = processes[0].communicate(timeout=120)
    assert processes[0].returncode == PEER_LOST
    assert "True None leaving, because of rank 1 (te2): disk on fire" in output
