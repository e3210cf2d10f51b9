"""Ranks that print more than a pipe holds do not stand still."""

import os
import subprocess
import sys

import pytest

from tests.support.rank_output import outputs

FIRST = "import sys\nopen(sys.argv[1]).close()\nprint('met')"
SECOND = "import sys\nsys.stdout.write('x' * 200_000)\nsys.stdout.flush()\nopen(sys.argv[1], 'w').close()"
"""They meet at a pipe with a name, where each waits for the other."""


def started(*programs, at):
    os.mkfifo(at)
    return [
        subprocess.Popen([sys.executable, "-c", program, str(at)], stdout=subprocess.PIPE, text=True)
        for program in programs
    ]


def test_a_rank_that_waits_for_another_which_prints_much_ends(tmp_path):
    first, second = outputs(started(FIRST, SECOND, at=tmp_path / "met"), 60)
    assert (first, len(second)) == ("met\n", 200_000)


def test_a_rank_that_does_not_end_is_said(tmp_path):
    processes = started(FIRST, at=tmp_path / "never")
    with pytest.raises(subprocess.TimeoutExpired):
        outputs(processes, 0.5)
    processes[0].kill()
    processes[0].communicate()
