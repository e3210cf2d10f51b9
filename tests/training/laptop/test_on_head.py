"""What a head answers in JSON: over a real conversation the same as here, and nothing of it is trusted."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from inventory import node_program
from inventory.node_program import Program, ProgramError
from tests.support.run_folders import make_run
from training.laptop import head_node, on_head
from training.laptop.head_node import Questions, VerbError
from training.laptop.on_head import fs, machines, run_folders
from training.laptop.run_look import read_looks
from training.run import folder, history
from training.run.launch import Launch, supervisor_argv
from training.text import files

RUN, OTHER = "tiny-20260131-154500", "tiny-20260131-160000"


@pytest.fixture(scope="module")
def far() -> Iterator[Questions]:
    with node_program.start_here(shlex.join(head_node.ARGV)) as program:
        yield Questions(program)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """One run with checkpoints, and one whose files are damaged."""
    make_run(tmp_path, RUN, steps=(2, 4), best="step-2\n")
    broken = make_run(tmp_path, OTHER)
    (broken / "status.json").write_bytes(b"\xff\x01\x1e{")
    (broken / "recipe.toml").write_text('名 = 1\nbase_model = "built-in:tiny"\n')
    (broken / "starts.jsonl").write_text('{"at": 1.5}\n{')
    (tmp_path / "\udcff").mkdir()
    return tmp_path


QUESTIONS = (
    (fs.text, f"{OTHER}/status.json"),
    (fs.text, f"{OTHER}/recipe.toml", 9),
    (fs.text, "none"),
    (fs.names, "."),
    (fs.names, "none"),
    (fs.newest_texts, ".", "*/launch.json", 1),
    (fs.matches, f"{RUN}/launch.json", "run_[a-z]+"),
    (fs.exists, RUN),
    (fs.executable, RUN),
    (fs.sha256, f"{RUN}/launch.json"),
    (run_folders.details, "."),
    (run_folders.checkpoints_of_all, "."),
    (run_folders.whole_checkpoint, f"{RUN}/checkpoints", [], [[]]),
    (run_folders.starting, "."),
    (machines.model, RUN),
)


@pytest.mark.parametrize(("verb", "path", "more"), [(verb, path, more) for verb, path, *more in QUESTIONS])
def test_what_is_answered_over_a_connection_is_what_is_answered_here(far: Questions, runs: Path, verb, path, more):
    assert far.ask(verb, runs / path, *more) == verb(runs / path, *more)


def test_looks_are_the_same_too_but_for_their_time(far: Questions, runs: Path):
    for here in (True, False):
        looks = [*far.ask(run_folders.looks, runs, here), far.ask(run_folders.look, runs / RUN, here)]
        assert [{**each, "now": 0} for each in looks] == [
            {**each, "now": 0} for each in [*run_folders.looks(runs, here), run_folders.look(runs / RUN, here)]
        ]


def test_a_long_answer_comes_in_pieces(far: Questions, tmp_path: Path):
    (tmp_path / "log").write_text("名" * on_head.PIECE)
    assert far.ask(fs.text, tmp_path / "log") == "名" * on_head.PIECE


def test_what_cannot_be_done_is_said_and_the_next_question_is_answered(far: Questions, tmp_path: Path):
    with pytest.raises(VerbError, match="No such file"):
        far.ask(fs.sha256, tmp_path / "none")
    assert far.ask(fs.exists, tmp_path)


def test_a_pipe_that_nobody_writes_to_is_no_file(far: Questions, tmp_path: Path):
    os.mkfifo(tmp_path / "plan.json")
    assert far.ask(fs.text, tmp_path / "plan.json") is None


def piece(content: object, more: bool = False) -> str:
    return json.dumps({"piece": content if isinstance(content, str) else json.dumps(content), "more": more}) + "\n"


NO_ANSWERS = (
    [],
    ["Welcome to te1\n"],
    [piece({"answer": 5})],
    [piece({"answer": [None]})],
    [piece([])],
    [piece({})],
    [piece('{"answer": [1e999]}')],
    [piece("[" * 100_000)],
    [piece('{"answer": ["', more=True)],
    [piece("x" * 200, more=True)] * 20,
)


@pytest.mark.parametrize("lines", NO_ANSWERS, ids=range(len(NO_ANSWERS)))
def test_what_is_no_answer_ends_the_conversation(lines: list[str], monkeypatch):
    monkeypatch.setattr(head_node, "LONGEST", 1000 if len(lines) > 1 else head_node.LONGEST)
    program = Program("te1", iter(lines), io.StringIO(), end=lambda: 0, drop=lambda: None, alive=lambda: True)
    with pytest.raises(ProgramError, match=r"^te1: "):
        Questions(program).ask(fs.names, "/")


def test_every_verb_has_a_contract_that_its_answers_are_held_against():
    hints = [get_type_hints(verb)["return"] for verb in on_head.VERBS.values()]
    assert len(hints) > 20 and not any(files.fits(object(), hint) for hint in hints)
    look = {"run": "r", "status": "", "alive": True, "now": 1, "metrics": "", "evaluation": ""}
    assert files.fits([look], list[run_folders.LookAnswer])
    for wrong in ({**look, "alive": 1}, {**look, "now": True}, {**look, "more": ""}, {"run": "r"}, [], None):
        assert not files.fits([wrong], list[run_folders.LookAnswer])


def test_files_of_runs_are_called_there_as_they_are_here():
    named = {**vars(files), **vars(history), **vars(folder)}
    own = {name: value for name, value in vars(run_folders).items() if isinstance(value, str) and name.isupper()}
    names = own.keys() & named.keys()
    assert len(names) > 10 and all(getattr(run_folders, name) == named[name] for name in names)
    assert folder.unit_of("") == run_folders.UNIT
    argv = supervisor_argv(Launch(RUN, "/r", (), "", (), "python", {}))
    assert f"{run_folders.SUPERVISES}/r" in " ".join(argv)
    for name in (RUN, "a b-20260131-154500", "tiny-2026", "名-20260131-154500", ".tiny-20260131-154500"):
        assert (re.fullmatch(run_folders.RUN_ID, name) is not None) == folder.is_run_id(name), name


def test_a_run_that_cannot_be_read_hides_no_other(far: Questions, runs: Path):
    """What `[old]` would tell systemctl is another number of states."""
    for name in ("status.json", "metrics.jsonl", "launch.json"):
        (runs / OTHER / name).unlink()
        (runs / OTHER / name).symlink_to(name)
    (runs / "loop-20260101-000000").symlink_to("loop-20260101-000000")
    (runs / "tiny-20260131-154500 [old]").mkdir()
    hollow = make_run(runs, "hollow-20260131-154500")
    (hollow / "metrics.jsonl").write_bytes(b"\0" * (11 << 20))
    (hollow / "checkpoints").rmdir()
    (hollow / "checkpoints").symlink_to("checkpoints")
    assert [each["run"] for each in far.ask(run_folders.looks, runs, True)] == [hollow.name, RUN]
    assert [each["run"] for each in far.ask(run_folders.details, runs)] == [hollow.name, RUN, OTHER]
    assert far.ask(run_folders.checkpoints_of_all, runs)[RUN] == ["best", "step-2", "step-4"]
    far.ask(run_folders.remove_abandoned, runs)


def test_states_that_cannot_be_matched_to_their_units_are_no_answer(runs: Path, monkeypatch):
    (runs / "bin").mkdir()
    (runs / "bin" / "systemctl").write_text("#!/bin/sh\necho active\n")
    (runs / "bin" / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{runs}/bin:{os.environ['PATH']}")
    with pytest.raises(OSError, match="1 states of 2 units"):
        run_folders.looks(runs, False)


def test_a_checkpoint_that_cannot_be_read_is_a_damaged_one(runs: Path):
    (runs / RUN / "checkpoints" / "step-4" / "SHA256SUMS").symlink_to("SHA256SUMS")
    assert run_folders.whole_checkpoint(runs / RUN / "checkpoints", [], [[]]) == {"whole": 2, "damaged": [4]}


def test_a_program_that_reads_its_input_takes_no_question(tmp_path: Path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\ncat\necho A10, 23028\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with node_program.start_here(shlex.join(head_node.ARGV)) as program:
        questions = Questions(program)
        assert questions.ask(machines.hardware, "")["cards"] == ["A10, 23028"]
        assert questions.ask(machines.now)


def test_a_file_that_is_too_long_is_not_cut_in_silence(runs: Path, monkeypatch):
    monkeypatch.setattr(fs, "MOST", 10)
    (runs / "plan.json").write_text("x" * 11)
    with pytest.raises(OSError, match="more than 10"):
        fs.text(runs / "plan.json")
    assert fs.text(runs / "plan.json", 3) == "xxx"


def test_a_run_whose_status_is_too_long_is_shown_with_that(runs: Path, monkeypatch):
    monkeypatch.setattr(fs, "SMALL", 10)
    assert {each.run_id: each.fault[:30] for each in read_looks(run_folders.looks(runs, True))} == dict.fromkeys(
        (RUN, OTHER), "its status.json cannot be read"
    )
