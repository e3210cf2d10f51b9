"""Checkpoints: whole or not there, found again, refused where they belong to another run."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")

from safetensors.torch import load_file  # noqa: E402

from training.node import checkpoint  # noqa: E402
from training.node.checkpoint import CheckpointError, SaveError, TrainerState  # noqa: E402
from training.text.files import sums_of, sums_text  # noqa: E402

pytestmark = pytest.mark.torch

A, B = "base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"


def _tensors():
    shapes = {A: (2, 6), B: (4, 2)}
    return {
        f"{part}/{name}": torch.randn(shape)
        for part in ("master", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


def _state(step):
    return TrainerState(step, 40 * step, 2, {"lora.rank": 2, "seed": 0}, "base-hash", "data-hash", [{}, {}], step, 2)


def _config(folder):
    (folder / ("adapter_config.json" if folder.name == "adapter" else "config.json")).write_text('{"r": 2}\n')


def _save(folder, step, tensors=None, config=_config):
    return checkpoint.save(folder, tensors or _tensors(), _state(step), dtype=torch.bfloat16, write_config=config)


def test_a_checkpoint_reads_back_and_sha256sum_agrees_with_its_sums(tmp_path):
    tensors = _tensors()
    path = _save(tmp_path, 4, tensors)
    assert path == tmp_path / "step-4"
    assert checkpoint.read_state(path) == _state(4)
    read = checkpoint.read_tensors(path)
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items()) and read.keys() == tensors.keys()
    adapter = load_file(path / "adapter" / "adapter_model.safetensors")
    assert adapter.keys() == {A, B}
    assert torch.equal(adapter[B], tensors[f"master/{B}"].bfloat16())
    subprocess.run(["sha256sum", "--strict", "--check", "SHA256SUMS"], cwd=path, check=True, capture_output=True)


def test_what_a_killed_save_left_is_swept_away(tmp_path):
    for left in (".tmp-step-9", ".old-step-2"):
        (tmp_path / left / "adapter").mkdir(parents=True)
    _save(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_a_write_that_breaks_leaves_no_checkpoint_and_the_earlier_one_untouched(tmp_path):
    _save(tmp_path, 2)

    def full_disk(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 4 could not be written.*No space left"):
        _save(tmp_path, 4, config=full_disk)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    assert checkpoint.newest_valid(tmp_path) == (tmp_path / "step-2", [])


@pytest.mark.parametrize(
    ("limit", "config"), [(100, ""), (1000, ""), (2500, "x" * 3000)], ids=["adapter", "optimizer", "configuration"]
)
def test_a_disk_that_takes_no_more_leaves_nothing_half_written_behind(tmp_path, limit, config):
    _save(tmp_path, 2)
    tensors = {key: torch.randn(8, 8) for key in _tensors()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(SaveError, match=r"step 4 could not be written to .*[Ff]ile too large"):
            _save(tmp_path, 4, tensors, config=lambda folder: (folder / "adapter_config.json").write_text(config))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_every_file_of_a_checkpoint_may_be_read_by_whoever_logs_in(tmp_path):
    before = os.umask(0o077)
    try:
        path = _save(tmp_path, 4)
    finally:
        os.umask(before)
    modes = {at.name: at.stat().st_mode & 0o777 for at in [path, *path.rglob("*")]}
    assert modes == {at.name: 0o755 if at.is_dir() else 0o644 for at in [path, *path.rglob("*")]}


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, really = [], os.fsync

    def fsync(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = _save(tmp_path, 4)
    fresh = tmp_path / ".tmp-step-4"
    for at in [path, *path.rglob("*")]:
        assert fresh / at.relative_to(path) in synced, at
    assert synced[-1] == tmp_path, "the new name is synced last"


def test_nothing_named_step_n_exists_before_it_is_whole(tmp_path):
    def look(folder):
        assert folder == tmp_path / ".tmp-step-3" / "adapter"
        assert checkpoint.steps(tmp_path) == []
        _config(folder)

    _save(tmp_path, 3, config=look)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-3"]


def test_a_checkpoint_loses_its_name_before_its_first_file(tmp_path, monkeypatch):
    path, really = _save(tmp_path, 3), shutil.rmtree

    def rmtree(at):
        assert checkpoint.steps(tmp_path) == []
        really(at)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpoint.remove(path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 5 * 2**20))
    with pytest.raises(CheckpointError, match=r"step 3 needs 64\.0 MiB in .*, 5\.0 MiB are available; free .*--resume"):
        _save(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("optimizer.safetensors", lambda f: f.write_bytes(f.read_bytes()[:-1] + b"x"), "is damaged"),
        ("adapter/adapter_config.json", lambda f: f.unlink(), "is missing"),
        ("SHA256SUMS", lambda f: f.unlink(), "is missing"),
        ("SHA256SUMS", lambda f: f.write_text(""), "is not listed"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, name, spoil, reason):
    _save(tmp_path, 9)
    newer = _save(tmp_path, 10)
    spoil(newer / name)
    assert checkpoint.newest_valid(tmp_path) == (tmp_path / "step-9", [newer])
    assert reason in checkpoint.faults(newer)[0]


def _spoiled(content, chance, how):
    if how == "flip":
        at = chance.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    return content[: chance.randrange(len(content))]


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "model"])
def test_any_flipped_bit_cut_missing_or_extra_file_is_found_and_the_one_before_used(tmp_path, full, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 30)
    for step in (9, 10):
        newer = checkpoint.save(
            tmp_path, _tensors(), _state(step), dtype=torch.bfloat16, write_config=_config, full=full
        )
    chance = random.Random(3)
    files = [path for path in newer.rglob("*") if path.is_file()]
    assert len(files) == (7 if full else 5)
    for path in files:
        name, whole = str(path.relative_to(newer)), path.read_bytes()
        for how in ("flip",) * 40 + ("cut",) * 10:
            path.write_bytes(_spoiled(whole, chance, how))
            assert checkpoint.newest_valid(tmp_path) == (tmp_path / "step-9", [newer]), (name, how)
            said = checkpoint.faults(newer)
            assert name in " ".join(said) or name == "SHA256SUMS", said
        path.unlink()
        assert checkpoint.faults(newer) == [f"{name} is missing"]
        path.write_bytes(whole)
    assert checkpoint.newest_valid(tmp_path) == (newer, [])
    (newer / "model.safetensors").touch()
    assert checkpoint.faults(newer) == ["model.safetensors is not listed in SHA256SUMS"]


def test_hollow_untrained_and_broken_adapters_are_not_written(tmp_path):
    hollow, untrained, broken = _tensors(), _tensors(), _tensors()
    hollow[f"master/{A}"] = torch.empty(0)
    untrained[f"master/{B}"].zero_()
    broken[f"exp_avg/{A}"][0, 0] = float("nan")
    for tensors, reason in ((hollow, "not whole"), (untrained, "still zero"), (broken, "not finite")):
        with pytest.raises(CheckpointError, match=reason):
            _save(tmp_path, 1, tensors)
    assert list(tmp_path.iterdir()) == []


def test_another_run_s_checkpoint_is_refused_and_all_that_differs_is_named(tmp_path):
    path, saved = _save(tmp_path, 1), _state(1)
    checkpoint.refuse_other(path, saved, dict(saved.recipe), "base-hash", "data-hash")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.refuse_other(path, saved, {"lora.rank": 8, "seed": 0}, "other-base", "other-data")
    for part in (
        "lora.rank was 2 and is 8",
        "base model's files were base-hash and are other-base",
        "other-data",
    ):
        assert part in str(caught.value)
    assert "seed" not in str(caught.value)
    named = checkpoint.refuse_other(path, saved, {"lora.rank": 8, "seed": 0}, "base-hash", "data-hash", force=True)
    assert named == ["lora.rank was 2 and is 8"]


def test_a_checkpoint_from_before_validation_was_known_is_read(tmp_path):
    path = _save(tmp_path, 1)
    state = json.loads((path / "trainer_state.json").read_text())
    del state["validation_loss"]
    (path / "trainer_state.json").write_text(json.dumps(state))
    assert checkpoint.read_state(path) == _state(1)


def test_later_checkpoints_step_aside_when_an_earlier_one_is_resumed(tmp_path):
    for step in (2, 4, 6):
        _save(tmp_path, step)
    checkpoint.set_aside_after(tmp_path, 2)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-2"]
    assert (tmp_path / "superseded-step-6").is_dir()


def test_the_base_model_s_hash_is_the_recorded_one_or_the_same_computed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    computed = checkpoint.base_model_hash(tmp_path)
    (tmp_path / "SHA256SUMS").write_text(sums_text(sums_of(tmp_path)))
    assert checkpoint.base_model_hash(tmp_path) == computed
    (tmp_path / "spotune-model.json").write_text(json.dumps({"hash": "recorded"}))
    assert checkpoint.base_model_hash(tmp_path) == "recorded"


def test_the_state_survives_json():
    state = _state(3)
    assert TrainerState(**json.loads(json.dumps(dataclasses.asdict(state)))) == state
