"""The two doors of a fresh machine: what `make` installs, what `make test` leaves alone and begins with."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from inventory.localcloud.prerequisites import PACKAGE_OF_PROGRAM

ROOT = Path(__file__).parent.parent


def collected(folder, *argv):
    """Files of tests/acceptance that pytest would run; the files beside it are left out to be quick."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", f"--ignore-glob={ROOT}/tests/[!a]*", *argv],
        cwd=ROOT / folder,
        capture_output=True,
        text=True,
    )
    return set(re.findall(r"acceptance/(test_\w+\.py)::", done.stdout))


def test_every_package_the_local_cloud_asks_for_is_installed_by_make():
    told = subprocess.run(["make", "-pn", "system"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    packages = re.search(r"^SYSTEM_PACKAGES := (.*)$", told, re.MULTILINE)[1].split()
    assert set(PACKAGE_OF_PROGRAM.values()) - set(packages) == set()


@pytest.mark.parametrize("argv", [[], ["tests"]], ids=["make test", "the folder of all tests"])
def test_the_machines_of_cluster_toml_are_not_looked_at_unasked(argv):
    assert collected(".", *argv) == set()


@pytest.mark.parametrize(
    ("folder", "argv"),
    [(".", ["tests/acceptance"]), ("tests", ["./acceptance/"]), (".", ["tests/acceptance/test_node.py"])],
)
def test_the_acceptance_tests_run_where_their_path_is_given(folder, argv):
    assert "test_node.py" in collected(folder, *argv)


def pytest_of(target):
    """pytest's arguments as make would give them, but for the workers."""
    told = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = shlex.split(next(line for line in told.splitlines() if "/pytest " in line))[1:]
    assert "--no-loadscope-reorder" in words, "xdist would begin with the files of the most tests"
    del words[words.index("--numprocesses") : words.index("--numprocesses") + 2]
    return [word for word in words if word not in ("--dist", "loadfile", "--no-loadscope-reorder", "-q")]


LONG, PURE = "proof/test_drill_kept.py", "inventory/test_cluster.py"
OF_PROCESSES, WITH_TORCH = "inventory/test_command_line.py", "training/node/test_alone.py"


@pytest.mark.parametrize(
    ("target", "shown", "files"),
    [
        ("test", [OF_PROCESSES, PURE, LONG], [LONG, PURE, OF_PROCESSES]),
        ("quick", [OF_PROCESSES, PURE, LONG, WITH_TORCH], [PURE]),
    ],
)
def test_the_longest_files_come_first_and_make_quick_leaves_out_what_takes_long(target, shown, files):
    """A file is one worker's: a long one that begins last is waited for alone."""
    wanted = {ROOT / "tests" / name for name in shown}
    others = [path for path in (ROOT / "tests").rglob("test_*.py") if path not in wanted]
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", *pytest_of(target)]
    words += [f"--ignore={path}" for path in others]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert list(dict.fromkeys(re.findall(r"^tests/([\w/]+\.py)::", done.stdout, re.MULTILINE))) == files


def test_the_long_files_are_there():
    from tests.conftest import LONGEST_FIRST

    assert [name for name in LONGEST_FIRST if not (ROOT / "tests" / name).is_file()] == []
