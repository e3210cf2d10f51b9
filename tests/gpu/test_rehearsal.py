"""`make gpu` on the imitated card, in small shapes: every step of tests/gpu/hour.py, through the branches for CUDA."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.gpu.hour import BESIDE, STEPS
from tests.support.fake_cuda.loader import built

HERE = Path(__file__).parent
HOUR, IMITATED = HERE / "hour.py", HERE / "imitated"
STEPS_OF_TRAINING, ROWS, SHORT, LONG = 4, 4, 256, 512
NOT_IMITATED = {"2", "4a", "4b"}
"""Steps with Liger's kernels, which Triton does not compile without a driver's library."""
OUTCOMES = {"Liger's fused loss", "kernels of the loss"}
"""Of these steps, what `fab prove` says has failed."""

pytestmark = [pytest.mark.torch, pytest.mark.fake_cuda, pytest.mark.timeout(7200)]


def environ():
    """Of a machine with one imitated card."""
    paths = [str(IMITATED), *filter(None, [os.environ.get("PYTHONPATH")])]
    programs = f"{IMITATED}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    card = {"FAKE_CUDA_CARDS": "1", "FAKE_CUDA_BYTES": str(6 << 30), "TORCHDYNAMO_DISABLE": "1"}
    others = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return others | card | {"PYTHONPATH": ":".join(paths), "PATH": programs, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a rehearsal that has run: where everything was made, and its results."""
    folder = tmp_path_factory.mktemp("hour")
    work, out = folder / "work", folder / "out"
    compiled = work / "home" / ".cache" / "spotune" / "fake_cuda"
    compiled.parent.mkdir(parents=True)
    compiled.symlink_to(built().parent)
    words = ["--small", "--slow=8", "--limit=6000", f"--steps={STEPS_OF_TRAINING}", "--layers=4"]
    subprocess.run([sys.executable, HOUR, *words, f"--work={work}", f"--out={out}"], env=environ(), check=False)
    yield work, out
    shutil.rmtree(work, ignore_errors=True)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_step_ends_as_it_can_on_an_imitated_card(folders):
    work, out = folders
    rows = {row["step"]: (row["state"], row["result"]) for row in read(work / "state" / "rows.json")}
    assert list(rows) == [*(step.name for step in STEPS), BESIDE.name]
    assert {name for name, (state, _) in rows.items() if state != "ok"} == NOT_IMITATED, rows
    assert rows["2"] == ("FAIL 1", "2 of 4 tests passed; pytest ended with 1")
    assert "on NVIDIA H100 80GB HBM3" in rows["1"][1]
    assert rows["3a"][1].startswith("step 40, ")
    assert rows["3b"][1].startswith("step 60, ")
    summary = (out / "summary.txt").read_text()
    assert all(f"  {name:6}" in summary for name in rows)


def test_prove_fails_where_triton_has_to_compile_and_nowhere_else(folders):
    outcomes = read(folders[1] / "prove.json")["outcomes"]
    assert {row["name"] for row in outcomes if row["state"] == "fail"} == OUTCOMES
    assert sum(row["state"] == "pass" for row in outcomes) > 20


def test_measured_figures_stand_beside_predicted_ones(folders):
    numbers = read(folders[0] / "state" / "numbers.json")
    assert list(numbers) == ["rows", "long-rows", "nf4"]
    for name, length in (("rows", SHORT), ("long-rows", LONG), ("nf4", SHORT)):
        row = numbers[name]
        assert {f"max_length = {length}", f"global_batch = {ROWS * SHORT // length}"} <= set(row["recipe"])
        assert ('base_precision = "nf4"' in row["recipe"]) is (name == "nf4")
        measured, predicted = row["measured"], row["predicted"]
        assert measured["steps"] == STEPS_OF_TRAINING
        assert measured["loss_first"] == pytest.approx(math.log(4096), rel=0.05), "of an untrained head of that size"
        assert measured["loss_last"] < measured["loss_first"]
        assert predicted["memory_gib"] > measured["memory_gib"] > 0
        assert predicted["rates"]["flops_from"].startswith("measured by prove-")
    assert numbers["nf4"]["predicted"]["parts"]["weights"] < numbers["rows"]["predicted"]["parts"]["weights"]


def test_the_engine_and_plain_transformers_have_the_same_first_loss(folders):
    state = folders[0] / "state"
    ours, theirs = read(state / "engine.json"), read(state / "plain_loop.json")
    assert [row["name"] for row in ours] == ["checkpointing, our loss", "none computed again, our loss"]
    assert [row["name"] for row in theirs] == ["padded", "packed"]
    for row in (*ours, *theirs):
        assert row["loss_first"] == pytest.approx(ours[0]["loss_first"], rel=1e-3)
        assert row["step_s"] > 0
        assert len(row["losses"]) == STEPS_OF_TRAINING


def test_results_are_few_files_and_no_weights(folders):
    groups = {f"log-{step.log}.txt" for step in STEPS}
    assert {path.name for path in folders[1].iterdir()} == {*groups, "summary.txt", "prove.json", "evidence.tgz"}
    with tarfile.open(folders[1] / "evidence.tgz") as archive:
        names = [Path(member.name) for member in archive]
    assert {"plan.json", "metrics.jsonl", "recipe.toml", "rank-0.log"} <= {path.name for path in names}
    assert [path for path in names if path.suffix == ".safetensors"] == []
