"""On CI a skip is a failure, whatever asked for it; but for the reasons in tests/support/skips.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.skips import GPU

ROOT = Path(__file__).parent.parent
SKIPS = {
    "a mark": "@pytest.mark.skipif(True, reason='no pdsh')\ndef test_it(): pass",
    "a fixture": "@pytest.fixture\ndef tool(): pytest.skip('no pdsh')\ndef test_it(tool): pass",
    "a package of a test": "def test_it(): pytest.importorskip('no_such_package')",
    "a package of a file": "pytest.importorskip('no_such_package')\ndef test_it(): pass",
}


def code_of(folder, body, **env):
    (folder / "test_it.py").write_text(f"import pytest\n{body}\n")
    words = [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, "-p", "tests.conftest", folder]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "", **env}
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert ("CI must run this: " in done.stdout) is bool(done.returncode and env["CI"]), done.stdout
    return done.returncode


@pytest.mark.parametrize("by", SKIPS)
def test_a_skip_fails_on_ci_and_nowhere_else(tmp_path, by):
    failed = {"a package of a file": pytest.ExitCode.INTERRUPTED}.get(by, pytest.ExitCode.TESTS_FAILED)
    left_out = {"a package of a file": pytest.ExitCode.NO_TESTS_COLLECTED}.get(by, pytest.ExitCode.OK)
    assert (code_of(tmp_path, SKIPS[by]), code_of(tmp_path, SKIPS[by], CI="true")) == (left_out, failed)


def test_what_only_a_gpu_can_show_is_skipped_on_ci_too(tmp_path):
    assert code_of(tmp_path, f"def test_it(): pytest.skip({GPU!r})", CI="true") == pytest.ExitCode.OK
