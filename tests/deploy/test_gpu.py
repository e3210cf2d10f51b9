"""Ending GPU processes: never an active run's, never a later process of the same number."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from invoke import Exit

from deploy import survey, tasks
from deploy.on_node import probe
from deploy.survey import GpuAnswer, GpuProcess, held, kill_command


def described(pid: int, **changes: str) -> GpuProcess:
    return GpuProcess(pid=pid, memory_mib=1, **{**probe.process(pid), **changes})


def answer(active_runs: tuple[str, ...] = (), processes: tuple[GpuProcess, ...] = ()) -> GpuAnswer:
    return GpuAnswer(
        pci_gpus=1,
        smi_gpus=1,
        smi_error="",
        gpu_processes=processes,
        driver_loaded="580.178.04",
        driver_installed="580.178.04",
        active_runs=active_runs,
    )


def process(pid: int, run: str) -> GpuProcess:
    return GpuProcess(pid=pid, memory_mib=1, user="root", age="1:00", command="python", start="1", run=run)


def test_an_active_runs_processes_are_protected_on_every_node() -> None:
    answers = {
        "te1": answer(active_runs=("tiny-2",)),
        "te2": answer(processes=(process(1, "tiny-1"), process(2, "tiny-2"), process(3, ""))),
    }
    assert [(one.node, one.process.pid, one.protected) for one in held(answers)] == [
        ("te2", 1, False),
        ("te2", 2, True),
        ("te2", 3, False),
    ]


@pytest.fixture
def one_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of which te1 answers and te2 does not."""
    told = {"te1": answer(processes=(process(4711, ""),))}, {"te2": "cannot be reached"}
    monkeypatch.setattr(tasks, "_cluster", lambda: SimpleNamespace(nodes=[SimpleNamespace(name="te1")]))
    monkeypatch.setattr(survey, "ask_gpus", lambda nodes: told)


@pytest.mark.usefixtures("one_silent")
def test_a_silent_node_is_named_and_the_others_processes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exit) as ended:
        tasks.list_gpus.body(None)
    assert (ended.value.code, ended.value.message) == (1, "no answer: te2: cannot be reached")
    assert "4711" in capsys.readouterr().out


@pytest.mark.usefixtures("one_silent")
def test_nothing_is_ended_while_a_node_is_silent() -> None:
    with pytest.raises(Exit, match=r"te2: cannot be reached; .* nothing was ended") as ended:
        tasks.kill.body(None, yes=True)
    assert ended.value.code == 2


def end(*processes: GpuProcess) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", kill_command(processes)], capture_output=True, text=True, check=False, timeout=30
    )


def test_a_process_ends_on_the_polite_signal() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert end(described(child.pid)).returncode == 0
        assert child.wait(timeout=60) == -15


def test_a_process_that_ignores_the_polite_signal_is_ended_all_the_same() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
    argv = [sys.executable, "-c", f"{code}; signal.pause()"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert end(described(child.pid)).returncode == 0
        assert child.wait(timeout=60) == -9


def test_a_later_process_of_the_same_number_is_left_alone() -> None:
    code = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print(1, flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{code}; signal.pause()"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            assert end(described(child.pid, start="12345")).returncode == 0
            status = Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8")
            assert re.search(r"^State:\s+S", status, re.M) and re.search(r"^ShdPnd:\s+0+$", status, re.M), status
        finally:
            child.kill()
