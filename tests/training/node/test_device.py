"""A process computes where its launch says, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")

from tests.support.waiting import until  # noqa: E402
from training.node.device import DeviceError, DeviceWatch, device  # noqa: E402
from training.text.problems import NO_DEVICE  # noqa: E402

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[3]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU that works")


def test_a_launch_for_the_cpu_computes_there_whatever_cards_there_are():
    assert device(0, {"DS_ACCELERATOR": "cpu"}).type == "cpu"


@without_gpu
def test_a_launch_for_gpus_is_refused_where_none_can_be_used():
    with pytest.raises(DeviceError, match=r"no GPU of this node can be used \(.+\)"):
        device(0, {"DS_ACCELERATOR": "cuda"})
    assert device(0, {}).type == "cpu"


@without_gpu
@pytest.mark.parametrize("module", ["training.node.commcheck", "training.node.finetune"])
def test_a_rank_whose_driver_is_broken_fails_at_once_in_one_sentence(tmp_path, module):
    """On the CPU it would go on, and answer in the name of a GPU."""
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29788"}
    if module == "training.node.finetune":
        code = (
            "import sys; from training.node import finetune as f; f.open_work = lambda _: f.init_process_group(0, 30); "
        )
        argv = [sys.executable, "-c", f"{code}sys.argv[1:] = ['--run', {str(tmp_path)!r}]; f.main()"]
    else:
        argv = [sys.executable, "-m", module, "--run", str(tmp_path)]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, **given, "DS_ACCELERATOR": "cuda"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == NO_DEVICE, done.stdout + done.stderr
    assert "no GPU of this node can be used" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_without_a_gpu_nothing_is_seen_and_nothing_breaks():
    with DeviceWatch(torch.device("cpu"), every_s=0.01) as watch:
        assert not watch._thread.is_alive()
    assert (watch.card, watch.utilization()) == ("", None)


def test_utilisation_is_the_mean_of_what_nvml_says_and_a_card_that_does_not_tell_is_none(monkeypatch):
    busy, looks = iter([80, 40]), []

    def utilization(on):
        looks.append(on)
        return next(busy)  # a card that does not tell raises an error

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda on: "NVIDIA A10")
    with DeviceWatch(torch.device("cuda", 0), every_s=0.005) as watch:
        until(lambda: len(looks) > 3, "two looks that a card does not answer")
        assert watch.card == "NVIDIA A10"
        assert watch.utilization() == pytest.approx(0.6)
        assert watch.utilization() is None
