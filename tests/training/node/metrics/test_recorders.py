"""TensorBoard and Weights & Biases for real: what they hold after a resume, and what they may not do to a run."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from training.models.names import load_recipe
from training.node.metrics.recorder import Recorder
from training.node.metrics.steps import EvaluationMetrics, StepMetrics

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("tensorboard")
ROOT = Path(__file__).parents[4]
RUN = "tiny-20260131-154500"
STEP = StepMetrics(
    1, 9, 1.5, 1e-4, 0.5, 10, 5.0, 4, 0.1, 0.2, 0.3, "2026-01-01T00:00:00Z", token_accuracy=0.25, mfu=None, skipped=True
)
RECORD = """
import json, sys
from pathlib import Path
from training.node.metrics.recorder import Recorder
from training.node.metrics.steps import EvaluationMetrics, StepMetrics
from training.models.names import load_recipe
run, how = Path(sys.argv[1]), sys.argv[2]
recorder = Recorder(run, load_recipe("tiny", {"logging.tensorboard": "false", "logging.wandb": how}), None)
for step in (1, 2, 3):
    recorder.step(StepMetrics(step, 9, 1.5 / step, 1e-4, 0.5, 10, 5.0, 4, 0.1, 0.2, 0.3, "t"))
recorder.evaluation(EvaluationMetrics(3, 1.25, 3.49, 0.5, 8, 0.1, "t"))
recorder.close()
"""


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = load_recipe("tiny")
    for loss, resume_step, steps in ((1.0, None, (1, 2, 3, 4)), (2.0, 2, (3, 4, 5))):
        recorder = Recorder(tmp_path, recipe, resume_step)
        for step in steps:
            recorder.step(replace(STEP, step=step, loss=loss))
        recorder.evaluation(EvaluationMetrics(steps[-1], loss / 2, 1.5, 0.75, 8, 0.1, "t"))
        recorder.close()
    shown = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in shown.Scalars("train/loss")] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert [(e.step, e.value) for e in shown.Scalars("validation/loss")] == [(5, 1.0)]
    assert shown.Scalars("train/token_accuracy")[0].value == 0.25 and shown.Scalars("optimizer/skipped")[0].value == 1
    assert "speed/mfu" not in shown.Tags()["scalars"]
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in kept] == [1, 2, 3, 4, 5, 5]
    assert json.loads((tmp_path / "versions.json").read_text())["torch"].startswith("2.")


def test_a_folder_that_tensorboard_cannot_use_does_not_end_the_run(tmp_path):
    (tmp_path / "tb").write_text("a file where the folder should be")
    said: list[str] = []
    recorder = Recorder(tmp_path, load_recipe("tiny"), None, said.append)
    recorder.step(STEP)
    recorder.close()
    assert len(said) == 1 and said[0].startswith("TensorBoard is off for the rest of this run: ")
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def record(folder: Path, how: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Record a few steps with wandb, in a process of its own without any of this user's settings."""
    run = folder / RUN
    run.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", RECORD, str(run), how],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), "HOME": str(folder), "NETRC": str(folder / "netrc"), **env},
        capture_output=True,
        text=True,
        timeout=170,
    )


def history(path: Path) -> list[dict]:
    """The history in a .wandb file: a 7-byte head, then leveldb's log of protocol-buffer records.

    Blocks of 32 KiB; each record has crc32, length and a type of 1 (whole), 2 (first), 3 (middle), 4 (last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, rows, whole, at = path.read_bytes(), [], b"", 7
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            item, whole = Record.FromString(whole), b""
            if item.HasField("history"):
                rows.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in item.history.item})
    return rows


def test_wandb_offline_keeps_the_history_in_the_run_folder_and_asks_no_network(tmp_path):
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.1)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        done = record(tmp_path, "offline", HTTPS_PROXY=address, HTTP_PROXY=address, WANDB_BASE_URL=address)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        with pytest.raises(TimeoutError):
            proxy.accept()
    (folder,) = (tmp_path / RUN / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    rows = history(file)
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [(1, 1.5), (2, 0.75), (3, 0.5)]
    assert [(row["step"], row["validation/loss"]) for row in rows if "validation/loss" in row] == [(3, 1.25)]


def test_wandb_online_without_a_key_is_said_once_and_the_run_goes_on(tmp_path):
    pytest.importorskip("wandb")
    done = record(tmp_path, "online", WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Weights & Biases is off for the rest of this run: ") == 1 and "API key" in done.stdout
    assert (tmp_path / RUN / "metrics.jsonl").read_text().count("\n") == 4
