"""What is measured beside the step: waiting for other ranks, with real collectives, and the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.rank_output import outputs as said_by
from training.node.metrics.communication import CommunicationClock
from training.node.metrics.devices import DeviceWatch, visible_name

ROOT = Path(__file__).parent.parent
RANKS = """
import json, sys, time, datetime, torch, torch.distributed as dist
from training.node.metrics.communication import CommunicationClock
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
clock = CommunicationClock("cpu", 2)
dist.barrier()
shares = []
for asynchronous in (False, True):
    with clock:
        if rank == 0:
            time.sleep(0.5)  # the slow one
        work = dist.all_reduce(torch.ones(8), async_op=asynchronous)
        if asynchronous:
            time.sleep(0.3)  # computing meanwhile is not waiting
            work.wait()
    shares.append(clock.share())
with clock:
    time.sleep(0.2)
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
    assert fast[0] > 0.8 and slow[0] < 0.3
    assert 0.2 < fast[1] < 0.6, "0.2 of 0.5 s: the rest was spent computing"
    assert slow[1] < 0.2
    assert fast[2] == slow[2] == 0, "a step starts from nothing"


def test_one_rank_waits_for_nobody_and_what_gpus_overlap_is_not_made_up():
    alone, gpus = CommunicationClock("cuda", 1), CommunicationClock("cuda", 4)
    for clock, share in ((alone, 0.0), (gpus, None)):
        with clock:
            time.sleep(0.01)
        assert clock.share() == share


def test_without_a_gpu_nothing_is_seen_and_nothing_breaks():
    with DeviceWatch(999, every_s=0.01) as watch:
        time.sleep(0.05)
    assert (watch.card, watch.utilization()) == ("", None)


@pytest.mark.parametrize(
    ("local_rank", "visible", "name"),
    [(1, "", "1"), (1, "2,3", "3"), (0, "GPU-8f2c, GPU-11ab", "GPU-8f2c"), (0, "MIG-7", "MIG-7"), (2, "0,1", "2")],
)
def test_a_ranks_gpu_is_found_among_those_that_cuda_hides(local_rank, visible, name):
    assert visible_name(local_rank, visible) == name


class NVMLError(Exception):
    """As in pynvml."""


def test_utilisation_is_the_mean_of_what_nvml_says_and_a_card_that_does_not_tell_is_none(monkeypatch):
    busy = iter([80, 40])

    def rates(handle):
        value = next(busy, None)
        if value is None:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=value)

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"card {index}",
        nvmlDeviceGetName=lambda handle: "NVIDIA A10",
        nvmlDeviceGetUtilizationRates=rates,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with DeviceWatch(0, every_s=0.005) as watch:
        time.sleep(0.2)
        assert watch.card == "NVIDIA A10"
        assert watch.utilization() == pytest.approx(0.6)
        assert watch.utilization() is None
