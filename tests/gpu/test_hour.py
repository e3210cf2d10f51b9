"""The run of `make gpu`: what a step leaves behind is ended, and its row says how it ended."""

import os
import subprocess
import sys
from time import time

import pytest

from tests.gpu import hour
from tests.support.waiting import until

BODIES = {
    "ok": ("print('RESULT one'); print('b'); print('RESULT two')", "one; two"),
    "FAIL 3": ("print('a'); print('why'); raise SystemExit(3)", "why"),
    "TIME OUT": ("import time; print('waits', flush=True); time.sleep(600)", "still there: "),
}
CHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], " + (
    "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
)
"""A process in a session of its own, as ranks and their supervisor are."""


class OneStep(hour.Run):
    """A run whose step is a program."""

    body = ""

    def start(self, step, seconds, log):
        env = self.hour.environ(self.mark(step))
        with log.open("wb") as output:
            return subprocess.Popen([sys.executable, "-c", CHILD + self.body], env=env, stdout=output)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(hour, "SHORTEST_S", 1)
    run = OneStep(hour.Hour(["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--limit", "100"]))
    for folder in (run.hour.state, run.hour.out, run.hour.home):
        folder.mkdir(parents=True)
    (run.hour.state / "smi.csv").write_text("2026/01/01 00:00:00.000, 1200, 50, 1980, 300.0, 40\nhalf a li")
    return run


@pytest.mark.parametrize("state", BODIES)
def test_a_row_says_how_a_step_ended_and_nothing_of_it_stays(run, state):
    run.body, words = BODIES[state]
    step = hour.Step("3a", "title", "start", 2 if state == "TIME OUT" else 60, 0, print)
    run.step(step)
    assert run.rows[0]["state"] == state
    assert run.rows[0]["result"].startswith(words)
    until(lambda: not list(hour.marked(run.mark(step))), "the end of the step's processes")
    summary = (run.hour.out / "summary.txt").read_text()
    assert summary.startswith(state)
    assert "nvidia-smi: 1200 MiB at most" in summary


def test_a_step_begins_only_where_those_after_it_keep_their_seconds(run):
    run.step(hour.Step("3a", "title", "start", 60, 110, print))
    assert run.rows[0]["state"] == "no time"
    run.hour.asked.only = ["5a"]
    run.step(hour.Step("3a", "title", "start", 60, 0, print))
    assert len(run.rows) == 1, "it was not asked for"


def test_the_words_of_a_row_are_a_steps_results_and_else_its_last_line():
    assert hour.words_of("a\nRESULT one\nb\nRESULT two\n") == "one; two"
    assert hour.words_of("a\nb\n\n") == "b"
    assert hour.words_of("") == ""


def test_a_command_that_takes_too_long_is_ended_before_its_step_is(run, monkeypatch):
    monkeypatch.setenv(hour.ENDS, str(time() + hour.LAST_S + 1))
    assert run.hour.python("-c", "import time; time.sleep(600)") != 0


def test_nothing_of_hugging_face_or_the_cloud_is_in_a_steps_environment(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", "secret")
    assert "secret" not in run.hour.environ("3a").values()


def test_without_a_card_there_is_one_sentence_and_code_2(tmp_path):
    env = os.environ | {"PATH": str(tmp_path)}
    for words in ([], ["--card"]):
        done = subprocess.run([sys.executable, hour.__file__, *words], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{hour.NO_CARD}\n")


def test_earlier_steps_reserve_more_than_later_ones():
    reserves = [step.reserve_s for step in hour.STEPS if step.name not in hour.ALWAYS][:-2]
    assert reserves == sorted(reserves, reverse=True)
    assert len({step.name for step in hour.STEPS}) == len(hour.STEPS)
