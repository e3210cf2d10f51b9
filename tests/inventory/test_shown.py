"""Text that is not ours, wherever this side prints: never markup, its control characters shown."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from inventory.shown import show_plainly, shown, shown_in_colour
from inventory.terminal import console
from tests.support import programs

ROOT = Path(__file__).parents[2]
FOLDERS = ("inventory", "deploy", "training", "snapshots")
EVIL = "[/pytorch/third_party/gloo/x.cc:81] [rank0]: :boom: \x1b[2J\x1b]0;owned\x07 a\x08b \u202eevil"
HARMLESS = r"[/pytorch/third_party/gloo/x.cc:81] [rank0]: :boom: \x1b[2J\x1b]0;owned\x07 a\x08b \u202eevil"
RUN = "tiny-20260131-154500"


def test_control_characters_are_shown_and_lines_tabs_and_letters_stay():
    assert shown(EVIL) == HARMLESS and shown(HARMLESS) == HARMLESS
    assert shown("a\tb\n\u4e2d\u6587 \U0001f600\udcff\x9b\r") == "a\tb\n\u4e2d\u6587 \U0001f600\\udcff\\x9b\\r"


def test_every_way_to_print_shows_text_as_it_is():
    from rich.panel import Panel
    from rich.progress import Progress, TextColumn
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    terminal = console(file=out, width=300, force_terminal=True, color_system=None)
    grid = Table(EVIL, box=None)
    grid.add_row(EVIL)
    terminal.print(EVIL)
    terminal.print(Text(EVIL))
    terminal.print(Panel(EVIL))
    terminal.print(grid)
    said = out.getvalue()
    assert said.count(HARMLESS) == 4, said  # rich drops some of a Text's by itself
    assert not {"\x1b", "\x07", "\x08", "\u202e"} & set(said)
    with Progress(TextColumn("{task.description}", markup=False), console=terminal) as bar:
        bar.add_task(EVIL)
    moved = out.getvalue().removeprefix(said)
    assert r"[rank0]: :boom: \x1b[2J\x1b]0;owned" in moved
    assert "\x1b[2J" not in moved and "\x1b]" not in moved and "\x07" not in moved


def test_what_is_printed_without_rich_is_shown_too_and_rich_keeps_its_colours(monkeypatch):
    from rich.console import Console

    out, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    show_plainly()
    show_plainly()
    print(EVIL)
    print(EVIL, file=sys.stderr)
    Console(force_terminal=True, color_system="standard").print("x", style="red")
    assert out.getvalue() == f"{HARMLESS}\n\x1b[31mx\x1b[0m\n" and errors.getvalue() == HARMLESS + "\n"


def test_a_sign_that_the_terminals_encoding_lacks_is_written_out(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="gbk")
    monkeypatch.setattr("sys.stdout", terminal)
    show_plainly()
    print("\u27e6\u7b54\u27e7\U0001f600")
    console(file=sys.stdout).print("\u27e6")
    sys.stdout.flush()
    assert terminal.buffer.getvalue().decode("gbk") == "\\u27e6\u7b54\\u27e7\\U0001f600\n\\u27e6\n"


def calls():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", name, node


def test_there_is_one_kind_of_console_and_no_markup_anywhere():
    for at, name, call in calls():
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert name != "Console" or at.startswith("inventory/shown.py:"), f"{at}: inventory.terminal.console instead"
        assert name != "from_markup" and words.get("markup") != "True", f"{at}: say styles beside the text"
        assert name != "TextColumn" or words.get("markup") == "False", f"{at}: markup=False"


@pytest.mark.parametrize("words", [("status",), ("logs", "--follow"), ("logs",)], ids=" ".join)
def test_an_error_that_looks_like_markup_reaches_the_user_as_it_is(tmp_path: Path, words: tuple[str, ...]):
    """With the whole map of tasks, as a user has it."""
    shutil.copy(ROOT / "fabfile.py", tmp_path)
    run = tmp_path / "runs" / RUN
    (run / "logs").mkdir(parents=True)
    (run / "launch.json").write_text("{}")
    (run / "logs" / "launcher.log").write_text(EVIL + "\n")
    status = {"run_id": RUN, "state": "failed", "reason": EVIL, "last_lines": [EVIL]}
    (run / "status.json").write_text(json.dumps(status))
    env = {**os.environ, "PYTHONPATH": programs.PATH, "COLUMNS": "300"}
    argv = [sys.executable, "-m", "fabric", *words, "--here"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, timeout=120)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == ("--follow" in words), said
    assert HARMLESS in said and "Traceback" not in said
    assert not {"\x1b", "\x07", "\x08", "\u202e"} & set(said)


MOVES = """
import sys
from inventory.shown import show_plainly
show_plainly()
from training.laptop import run_look as terminal
from training.laptop.run_look import RunLook, progress
from training.run.folder import Status
terminal.SILENT_S = 0.0
status = Status("run", "running", started=100.0, updated=160.0)
row = {"step": 7, "total_steps": 9, "loss": 1.5, "lr": 1e-4, "tokens_per_s": 51234.0, "memory_gib": 21.5, "step_s": 1.0}
with progress("qwen3-coder-30b-a3b-20261123-160011") as show:
    print("what a node says: \\x1b[2J")
    show(RunLook(status, True, (row,), 5.0, evaluation={"step": 6, "validation_loss": 1.25}))
"""


def test_what_moves_on_a_terminal_is_drawn_and_what_others_say_meanwhile_is_shown():
    """At 80 columns how far it is, the loss and the time left are whole."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    words = {"cwd": ROOT, "env": {**os.environ, "TERM": "xterm-256color"}, "stdout": follower, "stderr": follower}
    program = subprocess.Popen([sys.executable, "-c", MOVES], **words)
    os.close(follower)
    seen = b""
    with contextlib.suppress(OSError):  # Linux's word for the end of what a terminal says
        while some := os.read(leader, 65536):
            seen += some
    os.close(leader)
    assert program.wait() == 0
    text = seen.decode()
    assert "\x1b[2K" in text, "it is drawn over"
    assert "\\x1b[2K" not in text and "\x1b[2J" not in text
    plain = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", text)
    assert "step 7/9  loss 1.5000  ETA 00:02  running 0:01:05" in plain
    assert "no answer from the head for 0 s" in plain
    assert "validation 1.2500 (step 6)  lr 1.00e-04  51234 tokens/s  21.5 GiB\r\n" in plain


def test_of_a_nodes_words_in_a_coloured_line_the_colours_alone_are_obeyed():
    line = "\x1b[31m[\x1b[1mte1\x1b[0m] \x1b[32mgood\x1b[0m"
    assert shown_in_colour(line) == line
    assert shown_in_colour("\x1b[8mx\x1b[2J\x1b]0;t\x07\x1b[30m\r") == r"\x1b[8mx\x1b[2J\x1b]0;t\x07\x1b[30m\r"
