"""Which of many consequences is the cause."""

from __future__ import annotations

import pytest

from training.diagnosis.xid import of_hardware, xid_lines
from training.exit_codes import FAILED, UNSAVED, UNUSABLE, WRONG_CHECKPOINT
from training.launch import Host, Launch
from training.supervision.failure import SECONDARY, Observation, RankEnd, rank_cause, verdict
from training.supervision.node_ssh import PING_TIMEOUT_S
from training.supervision.supervise import PING_EVERY_S, PING_MISSES, SETTLE_SECONDARY_S

LAUNCH = Launch(
    run_id="tiny-20260131-154500",
    run_dir="/data/runs/tiny-20260131-154500",
    hosts=tuple(Host(f"te{n}", f"10.0.0.{n}", 1) for n in range(1, 5)),
    module="training.finetune",
    arguments=(),
    python="python",
    env={},
)


def seen(*lines: str) -> Observation:
    observation = Observation(LAUNCH)
    for line in lines:
        observation.take(line)
    return observation


def ended(rank: int, code: int, oom: str = "false") -> str:
    return f'te{rank + 1}: [{rank}] @ended {{"code": {code}, "oom": {oom}}}'


def test_a_run_is_finished_only_when_every_rank_said_so():
    all_well = [ended(rank, 0) for rank in range(4)]
    assert verdict(seen(*all_well), False, 0).state == "finished"
    assert verdict(seen(*all_well[:3]), False, 0).state == "failed"


def test_a_launcher_that_ends_with_0_after_its_pdsh_was_killed_is_no_success():
    end = verdict(seen('te1: [0] @started {"pid": 7}'), False, 0)
    assert (end.state, end.rank) == ("failed", 0)
    assert "the launcher ended with code 0" in end.reason


def test_a_lost_node_explains_the_broken_connections_of_the_others():
    end = verdict(
        seen(
            "te1: [0] RuntimeError: Connection closed by peer [10.0.0.3]:4711",
            ended(0, 1),
            "te3: Timeout, server te3 not responding.",
            "pdsh@te1: te3: ssh exited with exit code 255",
        ),
        False,
        1,
    )
    assert (end.state, end.node, end.rank) == ("failed", "te3", None)
    assert end.reason == ("node te3 was lost: it no longer answers the head (Timeout, server te3 not responding.)")


def test_ssh_giving_a_node_up_is_enough_to_call_it_lost():
    end = verdict(seen("te3: Timeout, server te3 not responding."), False, None)
    assert (end.state, end.node) == ("failed", "te3")


def test_losing_every_other_node_at_once_points_at_the_head():
    observation = seen()
    for name in ("te2", "te3", "te4"):
        observation.lose(name)
    assert "its own network" in verdict(observation, False, None).reason


def test_a_rank_killed_for_memory_is_named_before_a_rank_that_lost_its_peer():
    end = verdict(seen("te1: [0] Connection reset by peer", ended(0, 1), ended(2, -9, "true")), False, 1)
    assert end.reason == "rank 2 on te3 was killed by the kernel: the node ran out of memory"
    assert (end.rank, end.node) == (2, "te3")


def test_a_launcher_that_cannot_start_on_a_node_is_quoted():
    end = verdict(
        seen(
            "te2: bash: line 1: /data/env/bin/python: No such file or directory",
            "pdsh@te1: te2: ssh exited with exit code 127",
        ),
        False,
        127,
    )
    assert "the launcher on te2 ended with code 127" in end.reason
    assert "/data/env/bin/python: No such file" in end.reason


@pytest.mark.parametrize(
    ("end", "line", "words"),
    [
        (RankEnd(-9, False), "", "killed by signal 9 (SIGKILL)"),
        (RankEnd(-11, False), "", "killed by signal 11 (SIGSEGV)"),
        (RankEnd(5, False), "rank 1 (te2): rank 0 on te1 is gone; leaving", "rank 0 on te1 is gone"),
        (RankEnd(5, False), "rank 0 (a): rank 0 (a): rank 3 (d) has been silent", "itself: rank 3 (d) has been silent"),
        (RankEnd(1, False), "OSError: [Errno 28] No space left on device: 'x'", "the disk is full"),
        (RankEnd(1, False), "torch.OutOfMemoryError: CUDA out of memory. Tried", "out of GPU memory"),
        (RankEnd(1, False), "RuntimeError: DefaultCPUAllocator: can't allocate memory", "ran out of memory"),
        (RankEnd(1, False), "RuntimeError: Connection closed by peer", "lost its connection"),
        (RankEnd(1, False), "KeyError: 'x'", "ended with code 1: KeyError: 'x'"),
    ],
)
def test_each_end_has_its_own_words(end: RankEnd, line: str, words: str):
    assert words in rank_cause(end, [line])[1]


def test_last_lines_are_the_failing_ranks_own():
    end = verdict(seen("te1: [0] fine here", "te3: [2] Traceback", "te3: [2] ValueError: odd", ended(2, 1)), False, 1)
    assert end.last_lines == ("Traceback", "ValueError: odd")


def test_ranks_that_all_left_on_request_make_a_stopped_run():
    end = verdict(seen(*[ended(rank, 3) for rank in range(4)]), True, 0)
    assert (end.state, "after saving" in end.reason) == ("stopped", True)


def test_the_heads_own_sentence_explains_why_every_rank_left():
    said = "checkpoint of step 44 needs 70.1 MiB in /data/runs/x/checkpoints, 1.9 MiB are available"
    end = verdict(
        seen(
            f"te2: [1] rank 1 (te2): leaving, because of the head: {said}",
            ended(1, 5),
            f"te1: [0] rank 0 (te1): {said}",
            ended(0, 4),
        ),
        False,
        1,
    )
    assert (end.rank, end.reason) == (0, f"rank 0 on te1 could not go on: {said}")


@pytest.mark.parametrize(
    ("code", "mistake"), [(UNUSABLE, True), (WRONG_CHECKPOINT, True), (UNSAVED, False), (FAILED, False)]
)
def test_only_what_the_user_gave_is_the_users_mistake(code: int, mistake: bool):
    end = verdict(seen("te1: [0] rank 0 (te1): a sentence", ended(0, code)), False, 1)
    assert (end.state, end.mistake) == ("failed", mistake)
    assert end.reason.endswith("a sentence")


FRAMES = [
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f1c4b8785e8 in libc10.so)",
    "frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(...) + 0x23d (0x7f1bfd1b1a6d in libtorch_cuda.so)",
    *(
        f"frame #{n}: c10d::ProcessGroupNCCL::Watchdog::runLoop() + 0xc80 (0x7f1bfd1b37f0 in x.so)"
        for n in range(2, 40)
    ),
]
GONE = [  # of a rank on an A10 whose partner's process had ended; torch 2.x, NCCL over sockets
    "te{n}:4711:4790 [0] NCCL INFO [Service thread] Connection closed by localRank 0",
    "[rank{r}]:[E1121 20:14:02.318 ProcessGroupNCCL.cpp:682] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=4211, OpType=_ALLGATHER_BASE, NumelIn=16384, NumelOut=65536, Timeout(ms)=1800000) ran for "
    "1800032 milliseconds before timing out.",
    "[rank{r}]:[E1121 20:14:02.401 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Process group "
    "watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, "
    "NCCL version 2.27.5",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "Last error:",
    "socketProgress: Connection closed by remote peer te3<41122>",
    *FRAMES,
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    *FRAMES,
]
ASSERT = [
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [12,0,0], thread: [64,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed.",
    "[rank{r}]:[E1121 20:14:02.401 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Process group "
    "watchdog thread terminated with exception: CUDA error: device-side assert triggered",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    *FRAMES,
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    *FRAMES,
]
MEMORY = [
    "Traceback (most recent call last):",
    '  File "/data/runs/x/training/loss.py", line 99, in forward',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 21.98 GiB "
    "of which 822.44 MiB is free.",
    *FRAMES,
]
ABORTED = -6


def told(rank: int, lines: list[str], code: int) -> list[str]:
    """What the launcher passes on of a rank, to its end."""
    return [*(f"te{rank + 1}: [{rank}] {line.format(r=rank, n=rank + 1)}" for line in lines), ended(rank, code)]


def test_a_rank_out_of_memory_is_named_before_those_that_nccls_watchdog_ended():
    witnesses = [line for rank in (0, 1, 3) for line in told(rank, GONE, ABORTED)]
    end = verdict(seen(*witnesses, *told(2, MEMORY, 1)), False, 1)
    assert (end.rank, end.node) == (2, "te3")
    assert "ran out of GPU memory" in end.reason


def test_a_node_that_is_gone_is_named_before_those_that_nccls_watchdog_ended():
    observation = seen(*[line for rank in (0, 1, 3) for line in told(rank, GONE, ABORTED)])
    first = observation.causes()[0]
    assert "lost its connection to the others" in first.reason and first.weight >= SECONDARY, "worth waiting longer"
    observation.lose("te3")
    end = verdict(observation, False, None)
    assert (end.node, end.rank) == ("te3", None)


def test_a_device_assert_is_the_cause_though_its_own_watchdog_says_it():
    witnesses = [line for rank in (0, 1, 3) for line in told(rank, GONE, ABORTED)]
    end = verdict(seen(*witnesses, *told(2, ASSERT, ABORTED)), False, 1)
    assert (end.rank, end.node) == (2, "te3")
    assert end.reason == "rank 2 on te3 failed on its GPU: CUDA error: device-side assert triggered"


def test_an_abort_without_a_word_of_partners_is_a_cause_of_its_own():
    weight, words = rank_cause(RankEnd(ABORTED, False), ["double free or corruption (!prev)"])
    assert weight < SECONDARY
    assert words == "was killed by signal 6 (SIGABRT): double free or corruption (!prev)"


def test_what_nccl_says_while_all_is_well_explains_nothing():
    chatter = (
        "te1:88:90 [0] NCCL INFO socketPollConnect: connect to 10.0.0.3<41122> returned Connection refused, retrying"
    )
    assert rank_cause(RankEnd(1, False), [chatter, "KeyError: 'x'"])[1] == "ended with code 1: KeyError: 'x'"


def test_the_head_listens_until_a_node_that_is_gone_has_been_missed():
    noticed_after_s = PING_MISSES * (PING_EVERY_S + PING_TIMEOUT_S)
    assert noticed_after_s + 5 < SETTLE_SECONDARY_S


DMESG = """\
[    1.204112] nvidia: loading out-of-tree module taints kernel.
[ 5120.100001] NVRM: Xid (PCI:0000:00:07): 45, pid=311, name=python, Ch 00000008
[ 9001.500000] NVRM: Xid (PCI:0000:00:07): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault\x1b[2J
[ 9002.000000] NVRM: Xid (PCI:0000:00:07): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
"""


def test_xid_lines_are_those_of_this_run():
    lines = xid_lines(DMESG, booted=1_000_000, since=1_006_000)
    assert [of_hardware(line) for line in lines] == [False, True]
    assert lines[0].endswith("MMU Fault?[2J"), "the kernel's log is data"
    assert xid_lines(DMESG, booted=1_000_000, since=1_010_000) == []


@pytest.mark.parametrize(("number", "says"), [(63, "Row Remapper: New row"), (92, "High single-bit ECC error rate")])
def test_what_a_card_mended_by_itself_stands_beside_the_cause(number, says):
    observation = seen(*told(2, ASSERT, ABORTED))
    observation.xids = {node: [f"NVRM: Xid (PCI:0000:00:07): {number}, {says}"] for node in ("te1", "te3")}
    end = verdict(observation, False, 1)
    assert (end.node, end.rank) == ("te3", 2)
    assert f"its driver says: NVRM: Xid (PCI:0000:00:07): {number}" in end.reason


def test_a_card_that_fell_off_the_bus_is_the_cause_and_other_xids_stand_beside_theirs():
    observation = seen(*told(0, GONE, ABORTED), *told(2, ASSERT, ABORTED))
    observation.xids = {"te3": xid_lines(DMESG, 0, 9001)[:1]}
    reason = verdict(observation, False, 1).reason
    assert reason.startswith("rank 2 on te3 failed on its GPU") and "its driver says: NVRM: Xid" in reason
    observation.xids = {"te1": xid_lines(DMESG, 0, 9001)}
    end = verdict(observation, False, 1)
    assert (end.node, end.rank) == ("te1", None)
    assert "GPU has fallen off the bus" in end.reason
