"""metrics.jsonl across a resume, what the numbers mean, and recorders that may fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.rank_output import outputs as said_by
from tests.support.skips import GPU
from training.cost.cards import CARDS, has_kernels, peak_flops
from training.cost.shape import ModelFacts, flops_per_token, utilization
from training.models.names import load_recipe
from training.node.metrics.recorder import Recorder
from training.node.metrics.steps import (
    CommunicationClock,
    EvaluationMetrics,
    StepMetrics,
    append,
    keep_until,
)

COMPUTE_CAPABILITY = {
    "B200": (10, 0),
    "H200": (9, 0),
    "H100": (9, 0),
    "H20": (9, 0),
    "L40S": (8, 9),
    "L40": (8, 9),
    "L20": (8, 9),
    "L4": (8, 9),
    "RTX PRO 6000": (12, 0),
    "RTX 5090": (12, 0),
    "RTX 6000 Ada": (8, 9),
    "RTX 4090": (8, 9),
    "A10": (8, 6),
    "A40": (8, 6),
    "A6000": (8, 6),
    "RTX 3090": (8, 6),
    "A100": (8, 0),
    "A800": (8, 0),
    "A30": (8, 0),
    "T4": (7, 5),
}
"""From NVIDIA's list of CUDA GPUs, by what the name contains."""
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""What the CUDA wheel of torch 2.13.0 was compiled for, as its libtorch_cuda.so says."""

STEP = StepMetrics(1, 9, 1.5, 1e-4, 0.5, 10, 5.0, 4, 0.1, 0.2, 0.3, "2026-01-01T00:00:00Z")
EVALUATION = EvaluationMetrics(2, 1.25, math.exp(1.25), 0.5, 8, 0.1, "2026-01-01T00:00:00Z")
QWEN_3B = ModelFacts(3_085_938_688, 29_933_568, 3_085_000_000, 36, ((0, 36 * 2048),))
QWEN_7B = ModelFacts(7_615_616_512, 40_370_176, 7_070_000_000, 28, ((0, 28 * 3584),))
QWEN_14B = ModelFacts(14_770_033_664, 68_812_800, 13_991_000_000, 48, ((0, 48 * 5120),))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_drops_the_lines_it_will_write_again_and_a_torn_last_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append(path, replace(STEP, step=step))
        append(path, replace(EVALUATION, step=step))
    with path.open("ab") as file:
        file.write('{"step": 2, "reason": "训'.encode()[:-1])
    keep_until(path, 2)
    append(path, replace(STEP, step=3))
    assert [(line["step"], "loss" in line) for line in lines(path)] == [
        (1, True), (1, False), (2, True), (2, False), (3, True),
    ]  # fmt: skip


@pytest.mark.parametrize("line", ["[]", "7", '{"loss": 1}', '{"step": null}', "\x00\x00"])
def test_a_line_that_is_no_step_is_dropped_by_a_resume(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    append(path, STEP)
    path.write_text(path.read_text() + line + "\n")
    keep_until(path, 5)
    assert [row["step"] for row in lines(path)] == [1]


def test_no_metrics_yet_is_nothing_to_cut(tmp_path):
    keep_until(tmp_path / "metrics.jsonl", 3)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_infinity_is_written_as_null_which_every_reader_of_json_knows(tmp_path):
    append(tmp_path / "metrics.jsonl", replace(STEP, grad_norm=math.inf, loss=math.nan, skipped=True))
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (row["grad_norm"], row["loss"], row["skipped"]) == (None, None, True)


@pytest.mark.parametrize(
    ("facts", "with_checkpointing", "without"),
    [(QWEN_3B, 20.1, 13.6), (QWEN_7B, 44.6, 30.0), (QWEN_14B, 89.0, 59.9)],
    ids=["3b", "7b", "14b"],
)
def test_executed_flops_are_those_worked_out_by_hand_at_2048_tokens(facts, with_checkpointing, without):
    assert flops_per_token(facts, 2048, 1.0)[1] / 1e9 == pytest.approx(with_checkpointing, abs=0.06)
    assert flops_per_token(facts, 2048, 0.0)[1] / 1e9 == pytest.approx(without, abs=0.06)


def test_the_models_flops_are_4p_for_lora_and_6p_for_full_and_know_no_checkpointing():
    lora = replace(QWEN_7B, trainable=0, layers=0, attends=())
    full = replace(QWEN_7B, trainable=QWEN_7B.parameters, layers=0, attends=())
    p = QWEN_7B.matmul_parameters
    assert flops_per_token(lora, 2048, 1.0) == (4 * p, 6 * p)
    assert flops_per_token(lora, 2048, 0.0) == (4 * p, 4 * p)
    assert flops_per_token(full, 2048, 1.0) == (6 * p, 8 * p)
    assert flops_per_token(full, 2048, 0.0) == (6 * p, 6 * p)
    assert flops_per_token(QWEN_7B, 2048, 1.0)[0] == flops_per_token(QWEN_7B, 2048, 0.0)[0]


def test_padding_counts_for_the_hardware_and_not_for_the_model():
    flops = flops_per_token(QWEN_7B, 2048.0, 1.0)
    mfu, hfu = utilization(flops, 3588.0, 3588.0, "NVIDIA A10", 4)
    assert hfu == pytest.approx(40 / 125, rel=2e-3)  # 40 TFLOP/s a card is what 3588 tokens/s were worked out from
    padded = utilization(flops, 3588.0, 2 * 3588.0, "NVIDIA A10", 4)
    assert padded == (mfu, pytest.approx(2 * hfu))
    assert mfu == pytest.approx(hfu * 29.76 / 44.6, rel=5e-3)


@pytest.mark.parametrize(
    ("card", "tflops"),
    [
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA H200", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", 65),
    ],
)
def test_a_cards_peak_is_found_by_the_name_its_driver_gives(card, tflops):
    assert peak_flops(card) == tflops * 1e12


@pytest.mark.parametrize("card", CARDS)
def test_torchs_wheel_has_kernels_for_every_card_of_the_tables(card):
    known = [capability for name, capability in COMPUTE_CAPABILITY.items() if name in card or card in name]
    assert known and has_kernels(known[0], ARCHITECTURES), card


def test_the_wheels_list_is_what_it_says_itself():
    """On a CUDA build; elsewhere the list is that of the wheel our lock names."""
    torch = pytest.importorskip("torch", reason="needs the [train] extra")
    lock = (Path(__file__).parents[4] / "deploy" / "requirements.lock").read_text()
    assert "\ntorch==2.13.0 " in lock, "another torch has another list than ARCHITECTURES"
    if torch.version.cuda is None:
        pytest.skip(GPU)
    said = {name for name in torch.cuda.get_arch_list() if name.startswith("sm_")}
    assert said == set(ARCHITECTURES)


@pytest.mark.parametrize("capability", [(7, 0), (6, 1), (3, 7), (7, 2)])
def test_cards_before_turing_have_no_kernels(capability):
    assert not has_kernels(capability, ARCHITECTURES)


def test_of_an_unknown_card_no_utilisation_is_made_up():
    assert utilization((1.0, 1.0), 1.0, 1.0, "cpu", 1) == (None, None)
    assert peak_flops("NVIDIA A1000 Laptop") is None


def recipe(**settings):
    return load_recipe("tiny", {"logging.tensorboard": "false"} | {f"logging.{k}": v for k, v in settings.items()})


def test_metrics_jsonl_is_always_written_and_a_new_run_begins_it_anew(tmp_path):
    append(tmp_path / "metrics.jsonl", STEP)
    recorder = Recorder(tmp_path, recipe(), None)
    recorder.step(STEP)
    recorder.evaluation(EVALUATION)
    recorder.close()
    assert [sorted({"loss", "validation_loss"} & row.keys()) for row in lines(tmp_path / "metrics.jsonl")] == [
        ["loss"],
        ["validation_loss"],
    ]
    assert not (tmp_path / "tb").exists() and not (tmp_path / "wandb").exists()


def test_a_recorder_that_breaks_is_said_once_and_the_run_goes_on(tmp_path):
    class Breaks:
        def write(self, step, scalars):
            raise ConnectionError("gone\nand more")

        def close(self):
            raise AssertionError("it was off already")

    said: list[str] = []
    recorder = Recorder(tmp_path, recipe(), None, said.append)
    recorder._sinks["Weights & Biases"] = Breaks()
    for step in (1, 2, 3):
        recorder.step(replace(STEP, step=step))
    recorder.close()
    assert said == ["Weights & Biases is off for the rest of this run: ConnectionError: gone"]
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


# What is measured beside the step: waiting for other ranks, with real collectives, and the GPU.

ROOT = Path(__file__).parents[4]
RANKS = """
import json, sys, datetime, torch, torch.distributed as dist
from types import SimpleNamespace
from training.node.metrics import steps
rank, now_s, wait = int(sys.argv[1]), 0, dist.Work.wait
steps.time = SimpleNamespace(perf_counter=lambda: now_s)

def passes(seconds):
    global now_s
    now_s += seconds

def waits(work, *args, **options):
    passes((1, 4)[rank])  # the slower one hardly waits
    return wait(work, *args, **options)

dist.Work.wait = waits
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
clock = steps.CommunicationClock("cpu", 2)
dist.barrier()
shares = []
for asynchronous in (False, True):
    with clock:
        passes((4, 1)[rank])
        work = dist.all_reduce(torch.ones(8), async_op=asynchronous)
        if asynchronous:
            passes(3)  # computing meanwhile is not waiting
            work.wait()
    shares.append(clock.share())
with clock:
    passes(2)
shares.append(clock.share())
print(json.dumps(shares))
dist.barrier()
"""


@pytest.mark.torch
def test_the_share_is_the_time_a_rank_waits_for_the_slower_one(tmp_path):
    pytest.importorskip("torch")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path / "meet")], env=env, stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    slow, fast = map(json.loads, said_by(ranks, 120))
    assert (slow, fast) == ([1 / 5, 1 / 8, 0], [4 / 5, 4 / 8, 0])


def test_one_rank_waits_for_nobody_and_what_gpus_overlap_is_not_made_up():
    alone, gpus = CommunicationClock("cuda", 1), CommunicationClock("cuda", 4)
    for clock, share in ((alone, 0.0), (gpus, None)):
        with clock:
            pass
        assert clock.share() == share
