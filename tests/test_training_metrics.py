"""metrics.jsonl across a resume."""

from __future__ import annotations

import json

from training.metrics import StepMetrics, append, keep_until


def _metrics(step):
    return StepMetrics(step, 9, 1.5, 1e-4, 0.5, 10 * step, 5.0, 4 * step, 0.1, 0.2, 0.3, "2026-01-01T00:00:00Z")


def test_a_resumed_run_drops_the_lines_it_will_write_again_and_a_torn_last_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append(path, _metrics(step))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    keep_until(path, 2)
    append(path, _metrics(3))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s"} <= lines[0].keys()


def test_no_metrics_yet_is_nothing_to_cut(tmp_path):
    keep_until(tmp_path / "metrics.jsonl", 3)
    assert not (tmp_path / "metrics.jsonl").exists()
