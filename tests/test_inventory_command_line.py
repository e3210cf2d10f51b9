"""What a user mistypes ends in one sentence and an exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from invoke import Exit

from inventory.command_line import one_sentence
from inventory.settings import SettingsError
from inventory.ssh import SshError

ROOT = Path(__file__).parent.parent


def fab(*argv, cluster=os.devnull):
    return subprocess.run(
        [Path(sys.executable).with_name("fab"), *argv],
        cwd=ROOT,
        env={**os.environ, "SPOTUNE_CLUSTER": str(cluster)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["logs", "--rank=1.5"], "--rank needs a whole number, not '1.5'"),
        (["check", "--line-rate-gbps", "x"], "--line-rate-gbps needs a number, not 'x'"),
        (["logs", "--rank", "x"], "--rank needs a whole number, not 'x'"),
        (["local.up", "--nodes", "two"], "--nodes needs a whole number, not 'two'"),
    ],
)
def test_a_malformed_flag_is_one_sentence_and_code_2(argv, sentence):
    done = fab(*argv)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (2, sentence, "")


def test_the_help_still_says_what_kind_of_value_a_flag_takes():
    assert "--rank=INT" in fab("--help", "logs").stdout


def test_unusable_settings_end_a_task_with_code_2(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("colour = 1")
    done = fab("local.status", cluster=file)
    assert (done.returncode, done.stderr) == (2, f"{file}: colour: unknown key\n")


class Odd(Exception):
    """An error of a task's own."""


@pytest.mark.parametrize(
    ("error", "code"), [(SettingsError("why"), 2), (Odd("why"), 2), (SshError("why"), 1), (TimeoutError("why"), 1)]
)
def test_mistakes_are_code_2_and_failures_code_1(error, code):
    with pytest.raises(Exit) as caught:
        with one_sentence(mistakes=(Odd,), failures=(TimeoutError,)):
            raise error
    assert (caught.value.message, caught.value.code) == ("why", code)


def test_an_error_nobody_expected_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), one_sentence():
        raise ZeroDivisionError
