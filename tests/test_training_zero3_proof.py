"""The proof of ZeRO-3 by processes of its own: what it finds, and that none of them outlives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.test_training_types import config_of  # noqa: E402
from training.exit_codes import UNUSABLE  # noqa: E402
from training.node import zero3_proof, zero3_ranks  # noqa: E402
from training.node.proof import LIMIT  # noqa: E402
from training.node.zero3_rank import apart  # noqa: E402

pytestmark = pytest.mark.torch

PROGRAM = [sys.executable, "-m", "training.node.zero3_proof", "--config"]
ROOT = Path(__file__).parents[1]
PATIENCE_S, LEAVING_S = 120, 10


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    config_of("qwen3").save_pretrained(made)
    return made


def wait_for(true):
    end = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def test_a_rank_that_forgets_its_samples_shows():
    assert zero3_proof.proved(config_of("qwen3"), rank="tests.support.forgetful_rank") > 0.1


def test_a_rank_that_fails_ends_the_others_with_its_last_line():
    before = psutil.Process().children(recursive=True)
    with pytest.raises(zero3_proof.RankError, match=r"No module named training\.no_such_rank"):
        zero3_proof.proved(config_of("qwen3"), rank="training.no_such_rank")
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_ranks_that_take_too_long_are_ended():
    before = psutil.Process().children(recursive=True)
    with pytest.raises(zero3_proof.RankError, match="its ranks did not end within 1 s"):
        zero3_proof.proved(config_of("qwen3"), 1.0)
    assert set(psutil.Process().children(recursive=True)) <= set(before)


@pytest.mark.parametrize("ending", ["kill", "input ends"])
def test_ranks_talk_over_the_loopback_and_end_with_who_asked(folder, tmp_path, ending):
    """Killed, or with whoever talks with it gone; what they left in the folder for passing files goes too."""
    place = tmp_path / "passing"
    place.mkdir()
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    asked = subprocess.Popen(
        [*PROGRAM, str(folder), "--attached"], cwd=ROOT, env=os.environ | {"TMPDIR": str(place)}, **pipes
    )
    ranks = wait_for(lambda: len(found := psutil.Process(asked.pid).children(recursive=True)) == 4 and found)
    heard = wait_for(lambda: [one for rank in ranks for one in listening(rank)])
    assert {one.laddr.ip for one in heard} == {"127.0.0.1"}
    asked.kill() if ending == "kill" else asked.stdin.close()
    asked.wait(PATIENCE_S)
    assert psutil.wait_procs(ranks, LEAVING_S)[1] == []
    assert [path for path in place.iterdir() if path.name.startswith("zero3-")] == []


def listening(rank):
    try:
        return [one for one in rank.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    except psutil.NoSuchProcess:
        return []


def test_the_ranks_compute_on_the_cpu_whatever_the_machine_has(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(subprocess, "Popen", lambda *words, env, **_: told.append(env))
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    zero3_ranks.Rank.started("a program", tmp_path, 1, 2).output.close()
    (env,) = told
    assert (env["DS_ACCELERATOR"], env["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")


def test_what_cannot_be_built_is_one_sentence(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "none-like-it"}))
    done = subprocess.run([*PROGRAM, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == UNUSABLE and "zero3" not in done.stdout
    assert done.stderr.strip().splitlines()[-1].startswith("no small copy of it can be trained with ZeRO-3: ")
    assert "none-like-it" in done.stderr.strip().splitlines()[-1]


def test_a_difference_is_of_the_tensor_that_differs_most():
    right = {"a": torch.ones(4), "b": torch.ones(100)}
    assert apart(right, right) == 0.0 < LIMIT
    assert apart({"a": torch.ones(4), "b": 1.5 * torch.ones(100)}, right) == pytest.approx(0.5)
    assert not apart(right | {"b": torch.full((100,), float("nan"))}, right) < LIMIT
    assert apart({"a": right["a"]}, right) == apart({}, {}) == float("inf")
    assert apart(right, right | {"b": torch.zeros(100)}) == float("inf"), "without a gradient nothing is shown"
