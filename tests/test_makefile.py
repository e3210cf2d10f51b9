"""The two doors of a fresh machine: what `make` installs, and what `make test` leaves alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from inventory.localcloud.prerequisites import PACKAGE_OF_PROGRAM

ROOT = Path(__file__).parent.parent


def collected(folder, *argv):
    """Files of tests/acceptance that pytest would run; the files beside it are left out to be quick."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", f"--ignore-glob={ROOT}/tests/test_*.py", *argv],
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
