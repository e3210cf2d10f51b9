"""Folders of runs, as a head or a fetch has them."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import until
from training.run.folder import CLAIM, LAUNCH, METRICS, STATUS, Status, begun, status_text


def make_run(folder, run_id, *, state="finished", steps=(), claim="mine", run_dir="", best=""):
    """A run's folder as the head or a fetch has it."""
    run = folder / run_id
    (run / "checkpoints").mkdir(parents=True)
    (run / LAUNCH).write_text(json.dumps({"run_dir": run_dir or f"/data/runs/{run_id}"}))
    (run / CLAIM).write_text(f"{claim}\n")
    (run / STATUS).write_text(
        status_text(
            Status(run_id, state, price_h=6.0, currency="CNY", started=begun(run_id), ended=begun(run_id) + 1800)
        )
    )
    row = {"step": 6, "total_steps": 8, "step_s": 1, "loss": 1.0, "lr": 0.1, "tokens_per_s": 9, "memory_gib": 1}
    (run / METRICS).write_text(json.dumps(row) + "\n")
    for step in steps:
        (run / "checkpoints" / f"step-{step}").mkdir()
    if best:
        (run / "checkpoints" / "best").write_text(best)
    return run


@contextmanager
def supervisor_of(run):
    """Inside, a program with the command line of the run's supervisor waits for the end of its input. Gives that."""
    name = ["-m", "training.node.supervision.supervise", "--run", str(run)]
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()", *name]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as supervisor:
        words = Path(f"/proc/{supervisor.pid}/cmdline")
        until(lambda: bytes(run) in words.read_bytes(), "its command line, which a new program has not at once")
        try:
            yield supervisor
        finally:
            supervisor.kill()


@contextmanager
def going_on(folder, run_id):
    """Inside, a run of that id is going on there: its supervisor is a program that waits. Gives that."""
    run = make_run(folder, run_id, state="running", run_dir=str(folder / run_id))
    with supervisor_of(run) as supervisor:
        (run / STATUS).write_text(json.dumps({"run_id": run_id, "state": "running", "supervisor_pid": supervisor.pid}))
        yield supervisor
