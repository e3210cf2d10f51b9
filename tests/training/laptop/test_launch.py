"""What is handed to DeepSpeed's launcher and to systemd."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from training.laptop import open_cluster
from training.run.launch import (
    LONGEST_STOP_S,
    Host,
    Launch,
    LaunchError,
    deepspeed_env,
    hostfile,
    launch_text,
    parse_launch,
    rank_env,
    runner_argv,
    unit_argv,
)

HOSTS = (Host("te1", "10.0.0.11", 1), Host("te2", "10.0.0.12", 2), Host("te3", "10.0.0.13", 1))
RUN = "/data/runs/tiny-20260131-154500"
LAUNCH = Launch(
    run_id="tiny-20260131-154500",
    run_dir=RUN,
    hosts=HOSTS,
    module="training.node.finetune",
    arguments=(),
    python="/data/env/bin/python",
    env=rank_env(RUN, "cpu"),
)


def test_hostfile_lists_names_and_slots_in_rank_order():
    assert hostfile(HOSTS) == "te1 slots=1\nte2 slots=2\nte3 slots=1\n"


def test_deepspeed_reads_the_hostfile_as_meant(tmp_path: Path):
    runner = pytest.importorskip("deepspeed.launcher.runner", reason="needs the [train] extra")
    path = tmp_path / "hostfile"
    path.write_text(hostfile(HOSTS))
    assert list(runner.fetch_hostfile(str(path)).items()) == [("te1", 1), ("te2", 2), ("te3", 1)]


def test_deepspeed_env_has_one_assignment_a_line_and_nothing_else():
    assert deepspeed_env(rank_env(RUN, "cpu")) == (
        "PATH=/data/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
        "TORCH_EXTENSIONS_DIR=/data/env/torch_extensions\n"
        "OMP_NUM_THREADS=1\n"
        "HF_HUB_OFFLINE=1\n"
        "TOKENIZERS_PARALLELISM=false\n"
        "PYTHONUNBUFFERED=1\n"
        "PYTHONDONTWRITEBYTECODE=1\n"
        f"SPOTUNE_RUN={RUN}\n"
        "DS_ACCELERATOR=cpu\n"
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY=64\n"
    )


def test_gpu_nodes_compute_on_their_gpus_or_not_at_all():
    assert rank_env(RUN, "cuda")["DS_ACCELERATOR"] == "cuda"


@pytest.mark.parametrize(
    ("built", "cards", "wanted"),
    [
        ("cuda: Optional[str] = '13.0'", 1, (1, "cuda")),
        ("cuda: Optional[str] = '13.0'", 4, (2, "cuda")),
        ("cuda: Optional[str] = '13.0'", 0, (2, "cpu")),
        ("cuda: Optional[str] = None", 2, (2, "cpu")),
    ],
)
def test_here_takes_the_gpus_that_this_python_can_use(tmp_path, monkeypatch, built, cards, wanted):
    devices, torch = tmp_path / "dev", tmp_path / "torch"
    for folder in (devices, torch):
        folder.mkdir()
    (torch / "version.py").write_text(f"__version__ = '2.13.0'\n{built}\n")
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(cards))):
        (devices / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(open_cluster, "here_gpus", partial(open_cluster.here_gpus, devices, torch))
    launch = open_cluster.launch_here(Path(RUN), "m", "/usr/bin", tmp_path)
    assert (launch.hosts[0].slots, launch.env["DS_ACCELERATOR"]) == wanted


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        ("", (2, "cpu", [0, 1])),
        ("-1", (2, "cpu", [0, 1])),
        ("3", (1, "cuda", ["3"])),
        ("2,3,1", (2, "cuda", ["2", "3"])),
    ],
)
def test_here_takes_no_gpu_that_cuda_visible_devices_hides(tmp_path, monkeypatch, visible, wanted):
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(open_cluster, "here_gpus", partial(open_cluster.here_gpus, tmp_path, tmp_path))
    launch = open_cluster.launch_here(Path(RUN), "m", "/usr/bin", tmp_path)
    world = next(word for word in runner_argv(launch, 1) if word.startswith("--world_info="))
    slots = json.loads(base64.urlsafe_b64decode(world.partition("=")[2]))["localhost"]
    assert (launch.hosts[0].slots, launch.env["DS_ACCELERATOR"], slots) == wanted


def test_memory_of_gpus_is_taken_in_segments_that_grow():
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True\n" in deepspeed_env(rank_env(RUN, "cuda"))
    assert "PYTORCH_ALLOC_CONF" not in rank_env(RUN, "cpu")


@pytest.mark.parametrize("value", ["", "two\nlines", 'a "quote"', "$HOME/x"])
def test_values_that_the_export_line_would_change_are_refused(value: str):
    with pytest.raises(LaunchError, match="NAME="):
        deepspeed_env({"NAME": value})


def test_several_nodes_are_started_over_the_hostfile_with_the_heads_private_address():
    assert runner_argv(LAUNCH, 29500) == [
        "/data/env/bin/python",
        "-u",
        "-m",
        "deepspeed.launcher.runner",
        f"--hostfile={RUN}/hostfile",
        "--master_addr=10.0.0.11",
        "--master_port=29500",
        "--module",
        "--no_local_rank",
        "training.node.supervision.rank_start",
        "training.node.finetune",
        "--run",
        RUN,
    ]


def test_deepspeeds_own_parser_takes_the_command_line():
    runner = pytest.importorskip("deepspeed.launcher.runner", reason="needs the [train] extra")
    arguments = runner.parse_args(runner_argv(LAUNCH, 29500)[4:])
    assert arguments.user_script == "training.node.supervision.rank_start"
    assert arguments.user_args == ["training.node.finetune", "--run", RUN]
    assert (arguments.module, arguments.no_local_rank, arguments.master_port) == (True, True, 29500)


def test_one_node_is_started_without_pdsh():
    argv = runner_argv(replace(LAUNCH, hosts=HOSTS[1:2]), 29500)
    assert argv[3] == "deepspeed.launcher.launch"
    assert "--world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19" in argv  # {"localhost": [0, 1]}


def test_ranks_are_numbered_node_by_node():
    assert [LAUNCH.host_of(rank).name for rank in range(LAUNCH.world_size)] == ["te1", "te2", "te2", "te3"]


def test_launch_json_comes_back_as_it_was_written():
    assert parse_launch(launch_text(LAUNCH)) == LAUNCH


def test_a_stop_of_the_unit_reaches_only_the_supervisor_and_waits_for_the_grace():
    argv = unit_argv(LAUNCH)
    assert argv[:4] == ["systemd-run", "--unit=spotune-tiny-20260131-154500", "--collect", "--quiet"]
    assert "--property=KillMode=mixed" in argv
    assert f"--property=TimeoutStopSec={LONGEST_STOP_S + 60}" in argv, "a grace measured while it runs is not cut short"
    assert "--property=TimeoutStopSec=5060" in unit_argv(replace(LAUNCH, stop_grace_s=5000))
    assert argv[-6:] == ["/data/env/bin/python", "-u", "-m", "training.node.supervision.supervise", "--run", RUN]
