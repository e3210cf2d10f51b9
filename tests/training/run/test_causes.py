"""Whoever acts on a run's end acts on values: every sentence of ours is worded anew here, and nothing changes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest

from training.laptop import follow
from training.laptop.run_look import RunLook
from training.node.supervision import failure
from training.run import causes, events, notices
from training.run import causes as foreign
from training.run.causes import NONE, UNKNOWN, Cause, CauseKind, parse_cause
from training.run.events import Ended, Failed, Resumed, Told, line_of, parse_line, parse_rows, row_of, unmistakable
from training.run.folder import Status, parse_status, status_text
from training.run.launch import Host, Launch, LaunchError
from training.run.notices import EVERYBODY, Notice
from training.text.problems import PEER_LOST, UNSAVED, UNUSABLE

RUN = "tiny-20260131-154500"
LAUNCH = Launch(RUN, f"/data/runs/{RUN}", tuple(Host(f"te{n}", "", 1) for n in (1, 2, 3)), "m", (), "python", {})
HEAD = SimpleNamespace(name="te1", here=False)
TEMPTING = "ran out of GPU memory; te2 is being reclaimed; the machines are released at 12:03 UTC; because of the head"
"""All that anybody ever looked for in a reason."""


class Reword(ast.NodeTransformer):
    """Other words in every sentence of a module; what is filled in stays, and so do patterns for what others say."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return node if ast.unparse(node.func) == "re.compile" else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and " " in node.value:
            words = re.sub(r"(\{\w*\})|[A-Za-z]+", lambda match: match[1] or "blah", node.value)
            return ast.copy_location(ast.Constant(words), node)
        return node


def reworded(module: ModuleType) -> ModuleType:
    tree = ast.fix_missing_locations(Reword().visit(ast.parse(Path(module.__file__).read_text())))
    copy = ModuleType(module.__name__)
    exec(compile(tree, module.__file__, "exec"), copy.__dict__)
    return copy


def of_rank(rank: int, event: events.Event) -> str:
    return f"te{rank + 1}: [{rank}] {line_of(event)}"


def failing(rank: int, code: int, cause: CauseKind, reason: str, **more: object) -> list[str]:
    said = f"te{rank + 1}: [{rank}] rank {rank} (te{rank + 1}): {reason}"
    return [said, of_rank(rank, Failed(cause, reason, **more)), of_rank(rank, Ended(code))]


LEAVING = "leaving, because of rank 1 (te2): disk on fire"
ENDS = {
    "a mistake": lambda say: failing(1, UNUSABLE, "unusable", say("recipe x: steps: no such key")),
    "a full disk": lambda say: failing(0, UNSAVED, "unsaved", say("the checkpoint could not be written")),
    "divergence": lambda say: failing(2, 1, "diverged", say("the run diverged in step 7")),
    "memory": lambda say: failing(2, 1, "out_of_gpu_memory", say("OutOfMemoryError: CUDA out of memory")),
    "an error": lambda say: failing(2, 1, "crashed", say("KeyError: 'x'")),
    "silence": lambda say: failing(0, PEER_LOST, "peer_lost", say("rank 2 (te3) has been silent"), peer=2),
    "a follower before its origin": lambda say: [
        *failing(0, PEER_LOST, "peer_lost", say(LEAVING), follows=True),
        *failing(2, PEER_LOST, "peer_lost", say("rank 1 on te2 is gone"), peer=1),
    ],
    "a lost node": lambda say: [of_rank(0, Ended(1)), "pdsh@te1: te3: ssh exited with exit code 255"],
    "a launcher": lambda say: ["pdsh@te1: te2: ssh exited with exit code 127"],
    "a signal": lambda say: [of_rank(1, Ended(-9))],
    "saved": lambda say: [of_rank(rank, Ended(3)) for rank in range(3)],
    "nothing": lambda say: [],
}


def verdict(module: ModuleType, lines: list[str]) -> failure.Verdict:
    seen = module.Observation(LAUNCH)
    for line in lines:
        seen.take(line)
    return module.verdict(seen, False, 1)


@pytest.mark.parametrize("end", ENDS)
def test_a_verdict_is_the_same_in_other_words(end: str):
    ours = verdict(failure, ENDS[end](str))
    theirs = verdict(reworded(failure), ENDS[end](lambda sentence: "blah"))
    assert ours.reason != theirs.reason, "it has other words"
    as_values = [(v.state, v.cause, v.rank, v.node) for v in (ours, theirs)]
    assert as_values[0] == as_values[1] and ours.cause.kind not in {"none", "unknown"}
    tempted = verdict(failure, ENDS[end](lambda sentence: TEMPTING))
    assert (tempted.state, tempted.cause, tempted.rank, tempted.node) == as_values[0]


@pytest.mark.parametrize(("node", "kind"), [("te2", "reclaimed"), (EVERYBODY, "released")])
def test_a_notice_has_the_same_cause_in_other_words(node: str, kind: str):
    ends = []
    for module in (notices, reworded(notices)):
        reclaims = module.Reclaims(("te1", "te2"), 0, known={node: Notice(node, 1_769_860_980.0, 0)})
        cause = reclaims.cause(True, 30)
        ends.append((cause, reclaims.ending(cause)))
    assert ends[0][0] == ends[1][0] == Cause(kind, at=1_769_860_980.0, saved=True, step=30)
    assert ends[0][1] != ends[1][1]


def concluded(status: Status | None, monkeypatch, capsys) -> tuple[type[Exception] | None, list[str]]:
    """What a run's end makes the terminal do: the error, whose class has the exit code, and what is offered."""
    monkeypatch.setattr(follow, "memory_ladder", lambda head, run_id: ["  --set micro_batch=1: 3.1 GiB less"])
    error = None
    try:
        follow.print_outcome(HEAD, RUN, RunLook(status, alive=False, metrics=()))
    except LaunchError as raised:
        error = type(raised)
    lines = capsys.readouterr().out.splitlines()
    return error, [line for line in lines if not line.startswith(RUN)]


@pytest.mark.parametrize("kind", get_args(CauseKind))
@pytest.mark.parametrize("state", ["failed", "stopped", "finished"])
def test_what_is_done_after_an_end_does_not_depend_on_its_sentence(kind: CauseKind, state, monkeypatch, capsys):
    status = Status(RUN, state, "rank 0 on te1 ended", Cause(kind, saved=True))
    expected = concluded(status, monkeypatch, capsys)
    assert concluded(status.changed(reason=TEMPTING), monkeypatch, capsys) == expected
    assert concluded(parse_status(status_text(status.changed(reason=""))), monkeypatch, capsys) == expected
    mistake = kind in causes.MISTAKES
    assert expected[0] == ((LaunchError if mistake else follow.RunFailed) if state == "failed" else None)
    offered = {"failed": {"out_of_gpu_memory"}, "stopped": set(follow.NEXT_STEPS), "finished": set(follow.NEXT_STEPS)}
    assert bool(expected[1]) == (kind in offered[state])


def test_a_status_without_a_cause_is_read_and_its_cause_is_unknown(monkeypatch, capsys):
    old = json.loads(status_text(Status(RUN, "failed", TEMPTING)))
    del old["cause"]
    assert parse_status(json.dumps(old)).cause == UNKNOWN
    assert concluded(parse_status(json.dumps(old)), monkeypatch, capsys) == (follow.RunFailed, [])


@pytest.mark.parametrize("content", [None, [], "killed", {}, {"kind": 7}, {"kind": "of a later version"}, {"kind": []}])
def test_what_is_no_cause_is_unknown(content: object):
    assert parse_cause(content) == UNKNOWN


def test_a_cause_survives_its_file_and_figures_that_are_none_are_left_out():
    status = Status(RUN, "failed", "", Cause("killed", signal=9))
    assert parse_status(status_text(status)) == status and Status(RUN, "running").cause == NONE
    assert parse_cause({"kind": "killed", "signal": "9", "xid": {}, "later": 1}) == Cause("killed")


def test_events_are_told_apart_from_a_ranks_own_output_and_survive_their_file():
    for event in (events.Started(7), Ended(-9, True), Failed("hung", "é\n", peer=3), Resumed(20, 4)):
        assert parse_line(line_of(event)) == event
        assert parse_line(unmistakable(line_of(event).encode()).decode()) is None
    for line in ("", "@", "@{}", "@7", '@{"event": "later"}', '@{"event": "started", "odd": 1}', "loss 1.2 @{"):
        assert parse_line(line) is None
    rows = row_of(Told(0, Resumed(20, 4)), 1.5) + "[]\nnull\n" + row_of(Told(3, Ended(0)), 2) + '{"at": 3, "ra'
    assert parse_rows(rows) == [Told(0, Resumed(20, 4)), Told(3, Ended(0))]


def test_an_error_means_what_the_library_it_came_from_says():
    def raised(inner: Exception) -> Exception:
        try:
            raise ValueError("our own words") from inner
        except ValueError as error:
            return error

    assert foreign.meaning_of(raised(OSError(28, "No space left on device"))) == "disk_full"
    assert foreign.meaning_of(RuntimeError("CUDA error: misaligned address")) == "gpu_failed"
    assert foreign.meaning_of(raised(KeyError("x"))) == "crashed"
