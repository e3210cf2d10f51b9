"""Ranks that print more than a pipe holds do not stand still."""

import subprocess
import sys

import pytest

from tests.support.rank_output import outputs

FIRST = "import sys, pathlib, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nprint('met')"
SECOND = "import sys, pathlib\nsys.stdout.write('x' * 200_000)\nsys.stdout.flush()\npathlib.Path(sys.argv[1]).touch()"


def started(*programs, at):
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
