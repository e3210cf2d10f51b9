"""Talking with a program, on this machine and over a real ssh channel: it ends when its input does."""

from __future__ import annotations

import ast
import gc
import shlex
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from paramiko.channel import ChannelFile

from inventory import node_program
from inventory.node_program import Program, ProgramError, ProgramRefused, start_here
from training.laptop.head_node import RemoteHead

ROOT = Path(__file__).parents[2]
ECHO = """
import json, sys, warnings
warnings.warn("something to stderr")
print(json.dumps({"ready": 1}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked == "leave": sys.exit(0)
    if asked == "mistake": print(json.dumps({"mistake": "no such thing"}), flush=True); sys.exit(2)
    if asked == "note": print(json.dumps({"note": "by the way"}), flush=True)
    if asked == "break": sys.exit("it is broken")
    print(json.dumps({"heard": asked}, ensure_ascii=False), flush=True)
"""
COMMAND = f"exec env PYTHONIOENCODING=utf-8 {shlex.quote(sys.executable)} -c {shlex.quote(ECHO)}"


@pytest.fixture
def head(node) -> Iterator[RemoteHead]:
    with closing(RemoteHead(node)) as opened:
        yield opened


@pytest.fixture(params=["here", "over ssh"])
def talk(request: pytest.FixtureRequest) -> Iterator[Program]:
    if request.param == "here":
        with start_here(COMMAND) as opened:
            yield opened
        return
    with request.getfixturevalue("head").talk(COMMAND) as opened:
        yield opened
    for program in request.getfixturevalue("server").programs:
        program.wait(60)


def test_lines_go_both_ways_in_any_script(talk: Program):
    messages = talk.messages()
    assert next(messages) == {"ready": 1}
    talk.send({"text": "你好\n世界"})
    assert next(messages) == {"heard": {"text": "你好\n世界"}}
    talk.send("leave")
    assert list(messages) == []


def test_a_mistake_is_the_programs_own_sentence(talk: Program):
    messages = talk.messages()
    next(messages)
    talk.send("mistake")
    with pytest.raises(ProgramRefused, match=r"^no such thing$"):
        next(messages)


def test_a_note_goes_to_stderr_and_is_no_answer(talk: Program, capsys):
    messages = talk.messages()
    next(messages)
    talk.send("note")
    assert next(messages) == {"heard": "note"}
    assert capsys.readouterr() == ("", "by the way\n")


def test_a_failure_has_the_last_words_and_the_code(talk: Program):
    messages = talk.messages()
    next(messages)
    talk.send("break")
    with pytest.raises(ProgramError, match="ended with 1: it is broken"):
        next(messages)


def test_words_may_look_like_a_message_or_stand_in_its_middle(head):
    """What goes to stderr stands where it was written: between the messages, never inside of one."""
    told = """
import json, os, sys
print("{'not': 'JSON'}", flush=True)
os.write(1, b'{"ready": ')
os.write(1, b'1}\\n')
os.write(2, b'a warning\\n')
os.write(1, b'{"ready": 2}\\n')
sys.exit("the last words")
"""
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(told)}"
    for _ in range(10):
        with head.talk(command) as opened:
            messages = opened.messages()
            assert [next(messages), next(messages)] == [{"ready": 1}, {"ready": 2}]
            with pytest.raises(ProgramError, match="ended with 1: the last words"):
                next(messages)


def test_closing_ends_a_program_that_waits_for_more(head, server):
    with head.talk(COMMAND) as opened:
        next(opened.messages())
    assert server.programs[0].wait(60) == 0


def test_a_lost_connection_ends_the_program_and_is_said(head, server):
    with head.talk(COMMAND) as opened:
        messages = opened.messages()
        next(messages)
        server.cut()
        with pytest.raises(ProgramError):
            next(messages)
    server.programs[0].wait(60)


def test_what_a_failed_program_leaves_is_collected_without_a_word(node, monkeypatch):
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: complaints.append(unraisable.exc_value))
    head = RemoteHead(node)
    with closing(head), pytest.raises(ProgramError), head.talk(COMMAND) as opened:
        next(opened.messages())
        opened.send("break")
        list(opened.messages())
    left = [each for each in gc.get_objects() if isinstance(each, ChannelFile)]
    assert left
    for file in left:
        file._wbuffer.close()  # as the collector may before it comes to the file: it knows no order
    del head, opened, left, file
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/on_node").glob("*.py")), ids=lambda path: path.stem)
def test_a_program_for_the_nodes_needs_only_what_is_there(path: Path):
    """The one that fetches models runs where training/ is and huggingface_hub, both put there by the deploy."""
    shipped = {"training", "deploy", "huggingface_hub"} if path.stem == "fetch_model" else set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.split(".")[0] for name in named} <= {*sys.stdlib_module_names, *shipped}


def test_a_user_who_is_not_root_runs_it_by_sudo(node, server):
    ubuntu = replace(node, user="ubuntu")
    head = RemoteHead(ubuntu)
    with closing(head), head.talk("exec true"):
        (command,) = server.commands
    assert command.startswith("sudo -n sh -c 'exec 2>&1; ") and command.endswith("; exec true'")


def test_of_what_a_shell_says_by_itself_little_is_kept_however_long_its_lines_are():
    lines = (str(number % 10) * (1 << 20) + "\n" for number in range(40))
    tracemalloc.start()
    words = list(node_program._behind("the mark", lines))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 << 20 and words[-1].endswith("9\n")
    assert list(node_program._behind("the mark", iter(["hello\n", "the mark\n", "{}\n"]))) == ["{}\n"]


@pytest.mark.parametrize("place", ["here", "over ssh"])
def test_a_line_without_an_end_is_cut_off(place, request, monkeypatch):
    monkeypatch.setattr("inventory.node_program.LONGEST_LINE", 100_000)
    monkeypatch.setattr("inventory.node_program.LEAVE_S", 0.2)
    start = start_here if place == "here" else request.getfixturevalue("head").talk
    with start("exec cat /dev/zero") as program, pytest.raises(ProgramError, match="more than 100000 characters"):
        list(program.messages())
