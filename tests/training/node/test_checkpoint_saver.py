"""Saving in the background: what it costs, what it keeps, how it says that it failed, and kills at any moment."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tests.support.waiting import until  # noqa: E402
from training.cost.memory import checkpoint_bytes  # noqa: E402
from training.node import checkpoint  # noqa: E402
from training.node.checkpoint import SaveError, TrainerState  # noqa: E402
from training.node.saving import Saver  # noqa: E402
from training.run.folder import newest_step  # noqa: E402
from training.text.problems import UNSAVED  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]
LAYER = "base_model.model.layers.0.q_proj"
ADAPTER = {
    f"{LAYER}.lora_A.weight": (2, 6),
    f"{LAYER}.lora_B.weight": (4, 2),
    f"{LAYER}.lora_magnitude_vector": (4,),
    "base_model.model.embed_tokens.token_adapter.trainable_tokens_delta": (1, 6),
    "base_model.model.lm_head.weight": (10, 6),
}
MODEL = {"model.embed_tokens.weight": (64, 8), "model.norm.weight": (8,), "lm_head.weight": (64, 8)}


def _tensors(shapes=None):
    return {
        f"{part}/{name}": torch.randn(shape)
        for part in ("master", "exp_avg", "exp_avg_sq")
        for name, shape in (shapes or ADAPTER).items()
    }


def _state(step, loss=None):
    return TrainerState(step, step, 1, {}, "base", "data", [{}], step, 1, validation_loss=loss)


def _config(folder):
    name = "adapter_config.json" if folder.name == "adapter" else "config.json"
    (folder / name).write_text("{}")


def _saver(folder, **settings):
    defaults = {"dtype": torch.bfloat16, "write_config": _config, "keep": 2, "keep_best": True, "full": False}
    return Saver(folder, **{**defaults, **settings})


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def _run(saver, losses):
    """Save steps 1, 2, 3 ... with these validation losses."""
    for step, loss in enumerate(losses, 1):
        saver.save(_tensors(), _state(step, loss))
    return saver.finish()


def test_a_save_is_handed_over_and_the_next_one_waits_for_it(tmp_path):
    disk, saved = threading.Event(), []

    def slow(folder):
        assert disk.wait(60)
        _config(folder)

    saver = _saver(tmp_path, write_config=slow, on_saved=saved.append)
    saver.save(_tensors(), _state(1))  # returns though the disk does not answer
    assert checkpoint.steps(tmp_path) == [] and saved == [] and saver.failure() is None
    second = threading.Thread(target=saver.save, args=(_tensors(), _state(2)))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "two saves in flight"
    disk.set()
    second.join(60)
    assert saver.finish() == tmp_path / "step-2"
    assert saved == [tmp_path / "step-1", tmp_path / "step-2"]


def test_a_rank_without_tensors_saves_nothing(tmp_path):
    saver = _saver(tmp_path)
    saver.save(None, _state(1))
    assert saver.finish() is None and _names(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "said"), [(OSError(28, "No space left on device"), "No space left"), (KeyError("r"), "KeyError: 'r'")]
)
def test_a_failure_in_the_background_is_raised_by_every_later_call(tmp_path, error, said):
    def broken(folder):
        raise error

    saver = _saver(tmp_path, write_config=broken)
    saver.save(_tensors(), _state(1))
    assert said in str(until(saver.failure, "the failure")) and saver.failure().exit_code == UNSAVED
    for call in (lambda: saver.save(_tensors(), _state(2)), lambda: saver.save(None, _state(2)), saver.finish):
        with pytest.raises(SaveError, match=rf"step 1 could not be written.*{said}"):
            call()
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.parametrize(
    ("losses", "kept", "best"),
    [
        ([None] * 4, ["step-3", "step-4"], None),
        ([3.0, 1.0, 2.0, 2.5, 4.0], ["step-2", "step-4", "step-5"], "step-2"),
        ([1.0, None, None, 1.0], ["step-1", "step-3", "step-4"], "step-1"),
        ([float("nan"), 5.0, float("nan"), None], ["step-2", "step-3", "step-4"], "step-2"),
        ([5.0, 4.0, 3.0], ["step-2", "step-3"], "step-3"),
    ],
    ids=["never validated", "second", "first of equals", "not a number", "newest"],
)
def test_the_newest_are_kept_and_the_best_with_them(tmp_path, losses, kept, best):
    _run(_saver(tmp_path), losses)
    assert [path.name for path in checkpoint.steps(tmp_path)] == kept
    assert ((tmp_path / "best").read_text() == f"{best}\n") if best else not (tmp_path / "best").exists()


def test_the_best_outlives_a_resume_and_gives_way_when_it_is_set_aside_or_not_wanted(tmp_path):
    _run(_saver(tmp_path), [9.0, 1.0, 2.0, 3.0])
    resumed = _saver(tmp_path)
    for step in (5, 6, 7):
        resumed.save(_tensors(), _state(step, 2.0))
    resumed.finish()
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-2", "step-6", "step-7"]
    checkpoint.remove(tmp_path / "step-2")
    resumed.save(_tensors(), _state(8, 4.0))
    resumed.finish()
    assert (tmp_path / "best").read_text() == "step-6\n"
    other = _saver(tmp_path, keep=1, keep_best=False)
    other.save(_tensors(), _state(9, 5.0))
    other.finish()
    assert _names(tmp_path) == ["step-9"]


def test_what_a_resume_put_aside_goes_once_a_newer_checkpoint_is_whole(tmp_path):
    _run(_saver(tmp_path), [None] * 4)
    checkpoint.set_aside_after(tmp_path, 3)

    def broken(folder):
        raise OSError(28, "No space left on device")

    failing = _saver(tmp_path, write_config=broken)
    failing.save(_tensors(), _state(4))
    with pytest.raises(SaveError):
        failing.finish()
    assert _names(tmp_path) == ["step-3", "superseded-step-4"]
    resumed = _saver(tmp_path)
    resumed.save(_tensors(), _state(4))
    resumed.finish()
    assert _names(tmp_path) == ["step-3", "step-4"]


def test_a_best_that_cannot_be_read_is_passed_over(tmp_path):
    _run(_saver(tmp_path), [1.0, 2.0])
    (tmp_path / "step-1" / "trainer_state.json").write_text("{")
    saver = _saver(tmp_path)
    saver.save(_tensors(), _state(3, 3.0))
    saver.finish()
    assert (tmp_path / "best").read_text() == "step-2\n"


def test_room_for_all_that_will_lie_there_is_asked_for_before_the_first_step(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    free = 5 * 10 * 2**20 + checkpoint.ROOM_TO_SPARE
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, free))
    saver = _saver(tmp_path / "checkpoints", keep=3)
    saver.check_room(10 * 2**20)  # the newest three, the best, the one being written
    free -= 1
    with pytest.raises(SaveError, match=r"5 checkpoints of 10\.0 MiB need 114\.0 MiB in .*, 114\.0 MiB are available"):
        saver.check_room(10 * 2**20)
    (tmp_path / "checkpoints" / "step-1").mkdir()
    saver.check_room(10 * 2**20)  # one of the five is there already


def _step_of_a_tiny_model():
    """An optimizer step of a model of the tiny recipe's size and length, one micro-batch."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(128, 4, 352, batch_first=True), 2)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 192, 128)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cpu_s(work, clock=time.process_time):
    began = clock()
    work()
    return clock() - began


def test_a_save_costs_less_than_two_steps_of_a_tiny_model(tmp_path):
    step = _step_of_a_tiny_model()
    tensors = _tensors({f"l{n}.lora_{side}.weight": (16, 128) for n in range(28) for side in "AB"})
    saver = _saver(tmp_path)
    steps_s, handing_over_s, saves_s = [], [], []
    for number in range(1, 6):  # in pairs, so that a busy machine slows both
        steps_s.append(_cpu_s(lambda: [step() for _ in range(3)]) / 3)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        began = time.process_time()
        handing_over_s.append(_cpu_s(lambda: saver.save(copies, _state(number)), time.thread_time))  # noqa: B023
        saver.finish()
        saves_s.append(time.process_time() - began)
    a_step_s = statistics.median(steps_s)
    assert statistics.median(handing_over_s) < a_step_s / 10
    assert statistics.median(saves_s) < 2 * a_step_s


def test_the_size_that_is_asked_for_is_the_size_on_the_disk_and_only_trainable_state_is_there(tmp_path):
    shapes = {f"{LAYER}.lora_A.weight": (64, 512), f"{LAYER}.lora_B.weight": (512, 64)}
    saver = _saver(tmp_path)
    saver.save(_tensors(shapes), _state(1))
    path = saver.finish()
    expected = checkpoint_bytes(2 * 64 * 512, torch.bfloat16.itemsize)
    assert expected < sum(at.stat().st_size for at in path.rglob("*") if at.is_file()) < expected + 4096


def test_magnitudes_token_rows_and_whole_modules_are_kept_and_hollow_ones_refused(tmp_path):
    tensors = _tensors()
    saver = _saver(tmp_path)
    saver.save(tensors, _state(1))
    kept = load_file(saver.finish() / "adapter" / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in kept.items()} == ADAPTER
    for name in ADAPTER:
        saver = _saver(tmp_path)
        saver.save({**tensors, f"master/{name}": torch.empty(0)}, _state(2))
        with pytest.raises(SaveError, match=rf"not whole: master/{name}"):
            saver.finish()


def test_full_fine_tuning_s_checkpoint_is_a_model_that_loads_by_its_index(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1500)
    tensors = _tensors(MODEL)
    saver = _saver(tmp_path, full=True)
    saver.save(tensors, _state(3))
    path = saver.finish()
    assert not checkpoint.faults(path) and not (path / "adapter").exists()
    where = json.loads((path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert where.keys() == MODEL.keys() and len(set(where.values())) == 2
    for name, file in where.items():
        with safe_open(path / "model" / file, "pt") as shard:
            assert torch.equal(shard.get_tensor(name), tensors[f"master/{name}"].bfloat16())
    read = checkpoint.read_tensors(path)
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())
    (path / "model" / next(iter(where.values()))).unlink()
    assert "is missing" in checkpoint.faults(path)[0]


class Calls:
    """Counts what the threads begun after it call, and calls `at_last` instead of the call of that number."""

    def __init__(self, last: float, at_last: Callable[[], None]) -> None:
        self.number, self._last, self._at_last = 0, last, at_last
        threading.setprofile(self._count)

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.number += 1
        if self.number == self._last:
            self._at_last()


def save_in_a_loop(folder: Path, first: int, announce: int, last_call: int) -> None:
    """Save one step after the other, say each once it is announced as safe, and be killed at a call or a return."""
    Calls(last_call, lambda: os.kill(os.getpid(), signal.SIGKILL))
    saver = _saver(folder, on_saved=lambda path: os.write(announce, f"{newest_step([path.name])} ".encode()) and None)
    tensors = _tensors({f"{LAYER}.lora_A.weight": (8, 64), f"{LAYER}.lora_B.weight": (64, 8)})
    for step in range(first, first + 1000):
        saver.save(tensors, _state(step, random.random()))  # a new best now and then


def kill_saves(folder: Path, seed: int, times: int) -> list[str]:
    """Kill `times` saving processes at random calls; gives all that was wrong afterwards."""
    chance, wrong, newest = random.Random(seed), [], 0
    calls, saver = Calls(math.inf, lambda: None), _saver(folder / "counted")
    _run(saver, [1.0, 2.0, 3.0, 4.0])
    saver._worker.shutdown()  # no thread at a fork
    for _ in range(times):
        listen, announce = os.pipe()
        last_call = chance.randrange(calls.number) + 1
        child = os.fork()
        if not child:
            save_in_a_loop(folder, newest + 1, announce, last_call)
            os._exit(1)
        os.close(announce)
        announced = b"".join(iter(lambda: os.read(listen, 10_000), b""))  # noqa: B023
        os.waitpid(child, 0)
        os.close(listen)
        last = int(announced.split()[-1]) if announced else newest
        path, damaged = checkpoint.newest_valid(folder)
        wrong += [f"{path.name} is half there" for path in checkpoint.steps(folder) if checkpoint.faults(path)]
        if damaged or (path is None and last) or (path and newest_step([path.name]) < last):
            wrong.append(f"after step {last} was saved, {path} is the newest and {damaged} are damaged")
        best = folder / "best"
        if best.exists() and checkpoint.faults(folder / best.read_text().strip()):
            wrong.append(f"the best is {best.read_text().strip()}, which is not whole")
        newest = newest_step([path.name]) if path else newest
    return wrong


@pytest.fixture
def memory(tmp_path):
    """A folder that no disk slows down: a kill, unlike a power cut, cannot tell the difference."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def test_a_kill_at_any_moment_leaves_whole_checkpoints_and_loses_none_that_was_announced(memory):
    seed = random.randrange(10**6)
    argv = [sys.executable, __file__, str(memory), str(seed), "50"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "", f"seed {seed}: {done.stdout}{done.stderr}"
    assert newest_step([checkpoint.steps(memory)[-1].name]) > 40


if __name__ == "__main__":
    print(*kill_saves(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), sep="\n", end="")
