"""The probe, run as on a node: by python3 from stdin; its parsers on nvidia-smi's documented answers."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.on_node import manifest, probe, spot_watch
from deploy.survey import GpuAnswer, NodeAnswer
from snapshots.on_node import look
from training.text.files import SUMS

SCRIPT = Path(probe.__file__)


def asked(question: dict[str, object]) -> str:
    return subprocess.run(
        ["python3", "-", json.dumps(question)],
        stdin=SCRIPT.open(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_probe_answers_what_the_doctor_reads() -> None:
    answer = NodeAnswer.model_validate_json(
        asked({"names": ["localhost", "no-such-host.invalid"], "ssh_to": ["no-such-host.invalid"]})
    )
    assert answer.logins["no-such-host.invalid"].error and not answer.logins["no-such-host.invalid"].host
    assert answer.hostname == socket.gethostname()
    assert answer.resolved == {"localhost": ("127.0.0.1",), "no-such-host.invalid": ()}
    assert answer.root_free_gib > 0
    GpuAnswer.model_validate_json(asked({"gpu_only": True}))


def test_the_probe_finds_two_free_ports_in_a_row_past_taken_ones() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert json.loads(asked({"ports": [port, port + 2]}))["free_ports"] is None
        assert json.loads(asked({"ports": [port - 1, port + 1]}))["free_ports"] is None
        assert json.loads(asked({"ports": [port, port + 40]}))["free_ports"] > port
    assert json.loads(asked({"ports": [port, port + 40]}))["free_ports"] is not None


def test_the_probe_needs_only_the_standard_library_of_python_3_10() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 10))
    roots = {name.name for n in ast.walk(tree) if isinstance(n, ast.Import) for name in n.names}
    roots |= {str(n.module).partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert roots <= sys.stdlib_module_names


def test_programs_that_run_alone_on_a_node_name_what_they_write_and_read_alike() -> None:
    assert (probe.MODEL_STAMP, probe.ENVIRONMENT_STAMP) == (look.MODEL_STAMP, look.ENVIRONMENT_STAMP)
    assert manifest.MANIFEST == look.MANIFEST == SUMS
    assert probe.NOTICES == spot_watch.FOLDER


def test_a_node_says_when_it_is_taken_back_as_its_watcher_wrote_it(tmp_path: Path) -> None:
    at = "2026-01-31T12:03:00Z"
    assert probe.reclaim_at(tmp_path, "te1") == ""
    (tmp_path / "te2.json").write_text(spot_watch.SpotNotice("te2", at, at).text)  # the head knows of the others too
    assert probe.reclaim_at(tmp_path, "te1") == ""
    (tmp_path / "te1.json").write_text(spot_watch.SpotNotice("te1", at, at).text)
    assert probe.reclaim_at(tmp_path, "te1") == at
    (tmp_path / "te1.json").write_text("[]")
    assert probe.reclaim_at(tmp_path, "te1") == ""


def test_compute_processes_are_read_and_their_memory_is_added_over_gpus() -> None:
    output = "4711, 21034\n4711, 512\n812, [N/A]\n"
    assert probe.gpu_processes(output) == [
        {"pid": 4711, "memory_mib": 21546},
        {"pid": 812, "memory_mib": None},
    ]


def test_an_empty_answer_and_hidden_processes_are_no_processes() -> None:
    assert probe.gpu_processes("") == []
    assert probe.gpu_processes("[Insufficient Permissions], [Insufficient Permissions]\n") == []
    assert probe.gpu_processes("No running processes found\n") == []


def test_a_process_is_described_with_the_run_it_belongs_to() -> None:
    code = "import signal; print(flush=True); signal.pause()"
    argv = [sys.executable, "-c", code, "--run", "/data/runs/tiny-20260101-000000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout.readline(), "from then on its arguments are there for others"
            found = probe.process(child.pid)
            assert found["run"] == "tiny-20260101-000000"
            assert found["user"]
            assert found["start"].isdigit()
            assert ":" in found["age"]
        finally:
            child.kill()


def test_a_process_that_is_gone_is_described_as_nothing() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        assert probe.process(child.pid)["start"] == ""


def test_torch_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lib/python3.12/site-packages/torch"
    folder.mkdir(parents=True)
    lines = "from typing import Optional\n__version__ = '2.13.0'\ndebug = False\ncuda: Optional[str] = {}\n"
    (folder / "version.py").write_text(lines.format("'13.0'"))
    monkeypatch.setattr(probe, "ENVIRONMENT", tmp_path)
    assert probe.torch_versions() == ("2.13.0", "13.0")
    (folder / "version.py").write_text(lines.format("None"))
    assert probe.torch_versions() == ("2.13.0", "")
