"""Which of many consequences is the cause."""

from __future__ import annotations

import pytest

from training.exit_codes import FAILED, UNSAVED, UNUSABLE, WRONG_CHECKPOINT
from training.launch import Host, Launch
from training.supervision.failure import Observation, RankEnd, rank_cause, verdict

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
