"""Which of many consequences is the cause."""

from __future__ import annotations

import pytest

from training.node.diagnosis.xid import parse_xid, xid_lines
from training.node.supervision.failure import SECONDARY, Observation, rank_end, verdict
from training.node.supervision.generation import PING_EVERY_S, PING_MISSES, SETTLE_SECONDARY_S
from training.node.supervision.nodes import PING_TIMEOUT_S
from training.run import causes
from training.run.causes import MISTAKES, Cause
from training.run.events import Ended, Event, Failed, Started, line_of
from training.run.launch import Host, Launch
from training.text.problems import FAILED, PEER_LOST, UNSAVED, UNUSABLE, WRONG_CHECKPOINT

LAUNCH = Launch(
    run_id="tiny-20260131-154500",
    run_dir="/data/runs/tiny-20260131-154500",
    hosts=tuple(Host(f"te{n}", f"10.0.0.{n}", 1) for n in range(1, 5)),
    module="training.node.finetune",
    arguments=(),
    python="python",
    env={},
)


def seen(*lines: str) -> Observation:
    observation = Observation(LAUNCH)
    for line in lines:
        observation.take(line)
    return observation


def of_rank(rank: int, event: Event) -> str:
    """A rank's event as the launcher passes it on."""
    return f"te{rank + 1}: [{rank}] {line_of(event)}"


def ended(rank: int, code: int, oom: bool = False) -> str:
    return of_rank(rank, Ended(code, oom))


def test_a_run_is_finished_only_when_every_rank_said_so():
    all_well = [ended(rank, 0) for rank in range(4)]
    assert verdict(seen(*all_well), False, 0).state == "finished"
    assert verdict(seen(*all_well[:3]), False, 0).state == "failed"


def test_a_launcher_that_ends_before_any_rank_has_started_is_quoted():
    end = verdict(seen("-" * 74, "no interface", "-" * 74), False, 1)
    assert (end.node, end.rank, end.cause) == ("te1", None, Cause("not_launched", code=1))
    assert "(no interface)" in end.reason


def test_a_node_that_mpirun_cannot_reach_or_lost_is_told_by_ssh():
    unknown, silent = "ssh: Could not resolve hostname te3: Name unknown", "Timeout, server te3 not responding."
    assert f"({unknown})" in verdict(seen("-" * 74, unknown, "(try again.)"), False, 1).reason
    assert verdict(seen(silent), False, 1).node == "te3"


def test_a_launcher_that_ends_with_0_after_its_pdsh_was_killed_is_no_success():
    end = verdict(seen(of_rank(0, Started(7))), False, 0)
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


def test_where_a_rank_fell_silent_it_is_named_and_not_the_one_that_left_because_of_it():
    silent = Failed("peer_lost", "rank 2 (te3) has been silent for 31 s; leaving", peer=2)
    followed = Failed("peer_lost", "leaving, because of rank 0", follows=True)
    lines = [of_rank(0, silent), ended(0, PEER_LOST), of_rank(1, followed), ended(1, PEER_LOST)]
    observation = seen(of_rank(2, Started(77)), of_rank(3, Started(78)), *lines)
    assert observation.silent_peer == {2: 77}, "what it does is asked"
    end = verdict(observation, False, 1)
    assert (end.node, end.rank, end.cause) == ("te3", 2, Cause("peer_lost", peer=2))
    assert end.reason == "rank 0 on te1 left by itself: rank 2 (te3) has been silent for 31 s; leaving"
    observation.take(ended(2, 1))
    assert observation.silent_peer == {}
    nobody = verdict(seen(of_rank(0, Failed("peer_lost", "?", peer=99)), ended(0, PEER_LOST)), False, 1)
    assert (nobody.node, nobody.rank) == ("te1", 0)


def test_a_rank_killed_for_memory_is_named_before_a_rank_that_lost_its_peer():
    end = verdict(seen("te1: [0] Connection reset by peer", ended(0, 1), ended(2, -9, True)), False, 1)
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
    ("code", "line", "cause", "words"),
    [
        (-9, "", Cause("killed", signal=9), "killed by signal 9 (SIGKILL)"),
        (-11, "", Cause("killed", signal=11), "killed by signal 11 (SIGSEGV)"),
        (5, "rank 0 on te1 is gone; leaving", Cause("peer_lost"), "rank 0 on te1 is gone"),
        (1, "OSError: [Errno 28] No space left on device: 'x'", Cause("disk_full", code=1), "the disk is full"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", Cause("out_of_gpu_memory", code=1), "out of GPU memory"),
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate", Cause("out_of_memory", code=1), "ran out of memory"),
        (1, "RuntimeError: Connection closed by peer", Cause("peer_lost", code=1), "lost its connection"),
        (1, "KeyError: 'x'", Cause("crashed", code=1), "ended with code 1: KeyError: 'x'"),
    ],
)
def test_each_end_of_a_rank_that_tells_nothing_has_its_cause_and_its_words(code, line, cause, words):
    found = rank_end(Ended(code), None, [line])
    assert found[1] == cause and words in found[2]


OF_GPUS = {
    "out_of_gpu_memory": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda "
        "error, NCCL version 2.29.7 ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'",
        "NCCL WARN Failed to CUDA calloc async 4194304 bytes",
        "te2: NCCL WARN Cuda failure 'out of memory'",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "Error out of memory at line 380 in file /src/csrc/ops.cu",
        "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY",
    ],
    "gpu_failed": [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: misaligned address",
        "RuntimeError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "NCCL WARN Cuda failure 'uncorrectable NVLink error detected during the execution'",
        "Unable to determine the device handle for GPU 0000:65:00.0: GPU is lost.",
    ],
    "crashed": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: CUDA error: peer access is not supported between these two devices",
        "RuntimeError: CUDA error: part or all of the requested memory range is already mapped",
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx(...)`",
        "RuntimeError: Triton Error [CUDA]: device kernel image is invalid",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Limit: 101376.",
    ],
}


@pytest.mark.parametrize(("kind", "words"), [(kind, words) for kind, each in OF_GPUS.items() for words in each])
def test_only_a_full_card_is_out_of_memory_and_only_a_broken_one_failed(kind, words):
    assert rank_end(Ended(1), None, [words])[1] == Cause(kind, code=1)
    assert causes.meaning_of(RuntimeError(words)) == kind


def test_what_a_rank_tells_goes_before_what_its_libraries_say():
    lines = ["torch.OutOfMemoryError: CUDA out of memory", "rank 0 (te1): the loss is nan"]
    told = Failed("diverged", "the loss is nan")
    assert rank_end(Ended(1), told, lines) == (5, Cause("diverged", code=1), "ended with code 1: the loss is nan")
    unforeseen = Failed("crashed", "KeyError: 'x'")
    assert rank_end(Ended(1), unforeseen, lines)[1] == Cause("out_of_gpu_memory", code=1)
    silent = Failed("peer_lost", "rank 3 (d) has been silent", peer=3)
    assert rank_end(Ended(5), silent, lines) == (
        SECONDARY,
        Cause("peer_lost", peer=3),
        "left by itself: rank 3 (d) has been silent",
    )


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
            of_rank(1, Failed("peer_lost", f"leaving, because of the head: {said}", follows=True)),
            ended(1, 5),
            of_rank(0, Failed("wrong_checkpoint", said)),
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
    end = verdict(seen("te1: [0] a sentence", ended(0, code)), False, 1)
    assert (end.state, end.cause.kind in MISTAKES) == ("failed", mistake)
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
    '  File "/data/runs/x/training/node/loss.py", line 99, in forward',
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
    first = observation.symptoms()[0]
    assert "lost its connection to the others" in first.reason and first.weight >= SECONDARY, "worth waiting longer"
    observation.lose("te3")
    end = verdict(observation, False, None)
    assert (end.node, end.rank) == ("te3", None)


def test_a_device_assert_is_the_cause_though_its_own_watchdog_says_it():
    witnesses = [line for rank in (0, 1, 3) for line in told(rank, GONE, ABORTED)]
    end = verdict(seen(*witnesses, *told(2, ASSERT, ABORTED)), False, 1)
    assert (end.rank, end.node) == (2, "te3")
    assert end.reason == "rank 2 on te3 ended with an error of CUDA: CUDA error: device-side assert triggered"


def test_a_gpus_failure_is_told_by_the_drivers_words_not_by_the_advice_that_ends_them():
    advice = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    lines = [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "CUDA kernel errors might ...",
        advice,
    ]
    _, cause, words = rank_end(Ended(FAILED), Failed("gpu_failed", advice), lines)
    assert cause == Cause("gpu_failed", code=FAILED)
    assert words == "failed on its GPU: CUDA error: an illegal memory access was encountered"
    assert advice in rank_end(Ended(FAILED), Failed("gpu_failed", advice), [])[2], "where the lines are lost"


def test_an_abort_without_a_word_of_partners_is_a_cause_of_its_own():
    weight, cause, words = rank_end(Ended(ABORTED), None, ["double free or corruption (!prev)"])
    assert weight < SECONDARY and cause == Cause("killed", signal=6)
    assert words == "was killed by signal 6 (SIGABRT): double free or corruption (!prev)"


def test_what_nccl_says_while_all_is_well_explains_nothing():
    chatter = (
        "te1:88:90 [0] NCCL INFO socketPollConnect: connect to 10.0.0.3<41122> returned Connection refused, retrying"
    )
    assert rank_end(Ended(1), None, [chatter, "KeyError: 'x'"])[2] == "ended with code 1: KeyError: 'x'"


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
    assert [parse_xid(line).of_hardware for line in lines] == [False, True]
    assert lines[0].endswith("MMU Fault?[2J"), "the kernel's log is data"
    assert xid_lines(DMESG, booted=1_000_000, since=1_010_000) == []


@pytest.mark.parametrize(("number", "says"), [(63, "Row Remapper: New row"), (92, "High single-bit ECC error rate")])
def test_what_a_card_mended_by_itself_stands_beside_the_cause(number, says):
    observation = seen(*told(2, ASSERT, ABORTED))
    observation.xids = {node: [parse_xid(f"NVRM: Xid (PCI:0000:00:07): {number}, {says}")] for node in ("te1", "te3")}
    end = verdict(observation, False, 1)
    assert (end.node, end.rank) == ("te3", 2)
    assert f"its driver says: NVRM: Xid (PCI:0000:00:07): {number}" in end.reason


def test_a_card_that_fell_off_the_bus_is_the_cause_and_other_xids_stand_beside_theirs():
    observation = seen(*told(0, GONE, ABORTED), *told(2, ASSERT, ABORTED))
    observation.xids = {"te3": [parse_xid(line) for line in xid_lines(DMESG, 0, 9001)[:1]]}
    reason = verdict(observation, False, 1).reason
    assert reason.startswith("rank 2 on te3 ended with an error of CUDA") and "its driver says: NVRM: Xid" in reason
    observation.xids = {"te1": [parse_xid(line) for line in xid_lines(DMESG, 0, 9001)]}
    end = verdict(observation, False, 1)
    assert (end.node, end.rank, end.cause) == ("te1", None, Cause("gpu_failed", xid=79))
    assert "GPU has fallen off the bus" in end.reason
