"""When a rank is forked from what was imported, and when it imports its program by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.supervised import status_of, supervisors
from tests.support.waiting import until
from training.node.supervision.end_processes import processes_of
from training.node.supervision.fork_server import read_ahead
from training.run.events import RUN_VARIABLE

pytestmark = pytest.mark.torch
pytest.importorskip("torch", reason="needs the [train] extra")

NOT_INITIALIZED, SUCCESS = 3, 0
LOADED = "import ctypes; ctypes.CDLL('libcuda.so.1'); "
ASKED = "from training.node.supervision.fork_server import driver_started; print(driver_started())"


@pytest.mark.parametrize(
    ("answer", "loads", "wanted"),
    [(NOT_INITIALIZED, "", "False"), (NOT_INITIALIZED, LOADED, "False"), (SUCCESS, LOADED, "True")],
)
def test_a_driver_that_is_loaded_and_not_yet_used_is_no_reason_against_a_fork(tmp_path: Path, answer, loads, wanted):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    (tmp_path / "cuda.c").write_text(f'extern "C" int cuDeviceGetCount(int *) {{ return {answer}; }}')
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", tmp_path / "cuda.c", "-o", library], check=True)
    env = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", loads + ASKED], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == wanted


def test_what_ranks_import_starts_no_thread_and_no_driver():
    code = (
        "import training.node.finetune, training.node.commcheck, training.node.prove.walk, threading; "
        f"{ASKED}; print(threading.active_count())"
    )
    env = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1"]


def test_files_are_read_ahead_into_the_kernels_cache(tmp_path: Path):
    def cached():
        done = subprocess.run(["fincore", "--bytes", "--noheadings", "--output", "RES", file], capture_output=True)
        return int(done.stdout)

    if shutil.which("fincore") is None:
        pytest.skip("needs fincore")
    file = tmp_path / "model.safetensors"
    with file.open("wb") as weights:
        weights.write(bytes(64 << 20))
        os.fsync(weights.fileno())
        os.posix_fadvise(weights.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached() < 1 << 20
    read_ahead([file])
    until(lambda: cached() == 64 << 20, "the file in the cache")


def test_a_spare_server_stays_as_long_as_a_process_of_its_run_does(tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), RUN_VARIABLE: str(tmp_path)}
    code = "from training.node.supervision import spare_server as spare; spare.IDLE_S = 0.1; spare.leave_spare('te1')"
    with subprocess.Popen(["sleep", "60"], env=env) as of_the_run:
        subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=True)
        until((tmp_path / ".spare-te1").exists, "it listens")
        time.sleep(1)  # ten times as long as it waits without one
        assert processes_of(str(tmp_path), keep_spare=True) == [of_the_run.pid]
        assert len(processes_of(str(tmp_path))) == 2
        of_the_run.kill()
    until(lambda: not processes_of(str(tmp_path)), "the spare server has ended")


@pytest.mark.parametrize("trouble", ["import nosuchmodule", "import threading; threading.Timer(60, print).start()"])
def test_a_program_that_cannot_be_shared_is_imported_by_each_rank(tmp_path: Path, trouble):
    def at_import(run_dir):
        program = run_dir / "training" / "program.py"
        program.write_text(f"{trouble}\nprint('imported', flush=True)\n{program.read_text()}")

    with supervisors(tmp_path) as start:
        run_dir, supervisor = start("leaves_at_once", before=at_import)
        code = supervisor.wait(120)
    log = (run_dir / "logs" / "rank-1.log").read_text()
    if "nosuch" in trouble:
        assert (code, status_of(run_dir).cause.kind) == (1, "crashed") and "ModuleNotFoundError" in log
    else:
        assert (code, log.count("imported")) == (0, 1)
