"""What is handed to the ranks' launcher and to systemd."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from training.laptop import open_cluster
from training.laptop.new_run import launch_files
from training.models.names import load_recipe
from training.node.supervision.end_processes import sweep
from training.node.supervision.rank_process import environment_of
from training.run.environment import AS_DEPLOYED, left_out, parse_etc_environment, rank_env
from training.run.folder import LAUNCH as LAUNCH_FILE
from training.run.folder import RECIPE
from training.run.launch import (
    Host,
    Launch,
    LaunchError,
    launch_text,
    parse_launch,
    sweep_command,
    unit_argv,
)
from training.run.launchers import (
    deepspeed_argv,
    deepspeed_env,
    fork_server_argv,
    hostfile,
    launcher_argv,
    network_of,
    parse_by_hand,
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
        "PYTHONNOUSERSITE=1\n"
        "PYTHONHOME=\n"
        "LD_LIBRARY_PATH=\n"
        "LD_PRELOAD=\n"
        "PATH=/data/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
        "TORCH_EXTENSIONS_DIR=/data/env/torch_extensions\n"
        "OMP_NUM_THREADS=1\n"
        "HF_HUB_OFFLINE=1\n"
        "TOKENIZERS_PARALLELISM=false\n"
        "PYTHONUNBUFFERED=1\n"
        "PYTHONDONTWRITEBYTECODE=1\n"
        f"DS_ENV_FILE={RUN}/.deepspeed_env\n"
        f"SPOTUNE_RUN={RUN}\n"
        "DS_ACCELERATOR=cpu\n"
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY=64\n"
    )


@pytest.mark.parametrize("lost", [True, False], ids=["no environment", "an environment in a folder with a space"])
def test_a_node_is_swept_by_the_runs_python_or_else_by_its_own(tmp_path: Path, lost: bool):
    python, used = tmp_path / "my env" / "python", tmp_path / "used"
    python.parent.mkdir()
    if not lost:
        python.write_text(f'#!/bin/sh\ntouch "{used}"\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    launch = replace(LAUNCH, run_dir=str(tmp_path), python=str(python))
    command = sweep_command(launch, only_list=True, code=str(Path(__file__).parents[3]))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"found": 0, "left": []}
    assert used.exists() is not lost


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
    world = next(word for word in deepspeed_argv(launch, 1) if word.startswith("--world_info="))
    slots = json.loads(base64.urlsafe_b64decode(world.partition("=")[2]))["localhost"]
    assert (launch.hosts[0].slots, launch.env["DS_ACCELERATOR"], slots) == wanted


def test_memory_of_gpus_is_taken_in_segments_that_grow():
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True\n" in deepspeed_env(rank_env(RUN, "cuda"))
    assert "PYTORCH_ALLOC_CONF" not in rank_env(RUN, "cpu")


@pytest.mark.parametrize("value", ["two\nlines", 'a "quote"', "$HOME/x"])
def test_values_that_the_export_line_would_change_are_refused(value: str):
    with pytest.raises(LaunchError, match="NAME="):
        deepspeed_env({"NAME": value})


def test_deepspeeds_launcher_starts_several_nodes_over_the_hostfile_with_the_heads_private_address():
    assert deepspeed_argv(LAUNCH, 29500) == [
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
        RUN,
    ]


SEEN = "import json, os, pathlib; pathlib.Path('seen.json').write_text(json.dumps(dict(os.environ)))"
SEEN_BY = "seen-' + os.environ['RANK'] + '"
OF_A_NODE = {
    **{"LD_LIBRARY_PATH": "/usr/local/cuda-12.1/lib64", "PYTHONHOME": "/opt/python", "PYTHONPATH": "/opt/old"},
    **{"NCCL_P2P_DISABLE": "1", "GLOO_SOCKET_IFNAME": "eth9", "CUDA_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "96"},
    **{"TORCH_CUDNN_V8_API_DISABLED": "1", "UCX_TLS": "tcp", "PYTHONNOUSERSITE": "", "TMPDIR": "/var/tmp"},
}


def test_a_rank_of_several_nodes_has_the_runs_environment_and_little_of_its_nodes(tmp_path: Path):
    """DeepSpeed's own runner; in place of pdsh a shell with what /etc/environment of a node says."""
    pytest.importorskip("deepspeed.launcher.runner", reason="needs the [train] extra")
    run, programs = tmp_path / "run", tmp_path / "bin"
    for folder in (run, programs):
        folder.mkdir()
    (tmp_path / ".deepspeed_env").write_text("# of root's\n\nNCCL_DEBUG=TRACE\n")
    env = {**rank_env(str(run), "cpu"), "PATH": f"{programs}:{os.environ['PATH']}"}
    launch = replace(LAUNCH, hosts=HOSTS[:1] + HOSTS[2:], run_dir=str(run), module="seen", env=env)
    launch = replace(launch, launcher="deepspeed", python=sys.executable)
    for name, text in launch_files(launch).items():
        (run / name).write_text(text)
    (run / "training").symlink_to(Path(open_cluster.__file__).parents[1])
    (run / "seen.py").write_text(SEEN)
    exports = "".join(f"export {name}={value}\n" for name, value in OF_A_NODE.items())
    (programs / "pdsh").write_text(f'#!/bin/sh\nshift 5\n{exports}printf %s "$*" | sed s/=%n/=1/ | sh\n')
    (programs / "ssh").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    home = {"HOME": str(tmp_path)}
    done = subprocess.run(deepspeed_argv(launch, 29500), cwd=run, env=env | home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads((run / "seen.json").read_text())
    assert seen.items() >= env.items() and seen["RANK"] == "1"
    assert not [name for name, value in OF_A_NODE.items() if seen.get(name) == value]


def test_a_rank_that_a_fork_server_starts_has_the_runs_environment_and_knows_its_place(tmp_path: Path):
    env = {**rank_env(str(tmp_path), "cpu"), "PATH": os.environ["PATH"]}
    hosts = (replace(HOSTS[0], slots=2), HOSTS[2])
    launch = replace(LAUNCH, hosts=hosts, run_dir=str(tmp_path), module="seen", python=sys.executable, env=env)
    (tmp_path / LAUNCH_FILE).write_text(launch_text(launch))
    (tmp_path / "training").symlink_to(Path(open_cluster.__file__).parents[1])
    (tmp_path / "seen.py").write_text(f"def main():\n    {SEEN.replace('seen.json', SEEN_BY)}\n")
    argv, env_of_login = fork_server_argv(launch, hosts[0]), os.environ | OF_A_NODE
    with subprocess.Popen(argv, cwd=tmp_path, env=env_of_login, stdin=subprocess.PIPE, text=True, bufsize=1) as server:
        server.stdin.write("29500\n")
        assert server.wait(60) == 0
    sweep(str(tmp_path))  # its copy, that waits for the next ranks
    for rank in ("0", "1"):
        seen = json.loads((tmp_path / f"seen-{rank}").read_text())
        place = {"MASTER_ADDR": "10.0.0.11", "MASTER_PORT": "29500", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}
        wanted = env | place | {"RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": "0,1"}
        assert seen.items() >= wanted.items()
        assert not [name for name, value in OF_A_NODE.items() if seen.get(name) == value]


@pytest.mark.parametrize(("rank", "of", "code"), [("1", "2", 0), ("x", "2", 2), ("1", "3", 2)])
def test_a_rank_that_mpirun_starts_has_the_names_that_torch_reads(tmp_path: Path, rank, of, code):
    env = {**rank_env(str(tmp_path), "cpu"), "PATH": os.environ["PATH"]}
    launch = replace(LAUNCH, hosts=HOSTS[1:2], run_dir=str(tmp_path), module="seen", python=sys.executable, env=env)
    (tmp_path / LAUNCH_FILE).write_text(launch_text(launch))
    (tmp_path / "training").symlink_to(Path(open_cluster.__file__).parents[1])
    (tmp_path / "seen.py").write_text(SEEN)
    of_mpi = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": of, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    argv = [sys.executable, "-m", "training.node.supervision.rank_start", "."]
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ | of_mpi, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code == 0:
        seen = json.loads((tmp_path / "seen.json").read_text())
        place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        assert seen.items() >= (env | place).items() and not [name for name in seen if name.startswith("OMPI")]
    else:
        assert done.stderr.startswith(("OMPI_COMM_WORLD_RANK=x: ", "3 ranks "))


def test_what_a_node_sets_for_all_its_users_is_read_as_pam_reads_it():
    text = """# of the vendor
    PATH="/usr/bin"
export https_proxy='http://10.0.0.1:3128'  # a proxy
TZ=Asia/Shanghai
=nothing
LANG
"""
    settings = {"PATH": "/usr/bin", "https_proxy": "http://10.0.0.1:3128", "TZ": "Asia/Shanghai"}
    assert parse_etc_environment(text) == settings


@pytest.mark.parametrize(("precision", "without"), [("dtype", "bitsandbytes"), ("nf4", None)])
def test_only_ranks_with_weights_in_four_bits_find_bitsandbytes(tmp_path, precision, without):
    (tmp_path / RECIPE).write_text(load_recipe("tiny", {"base_precision": precision}).to_toml())
    assert environment_of(replace(LAUNCH, run_dir=str(tmp_path)), {}).get("SPOTUNE_WITHOUT") == without


def test_what_a_login_has_anyway_is_no_setting_of_the_node():
    login = {"PWD": "/root", "OLDPWD": "/", "SHLVL": "1", "_": "/usr/bin/env", "MOTD_SHOWN": "pam"}
    login |= {"SSH_CONNECTION": "a", "XDG_SESSION_ID": "5", "HOME": "/root"}
    assert left_out(LAUNCH.env, login | {"UCX_TLS": "tcp", "PWD_OF_MINE": "x"}) == ["PWD_OF_MINE", "UCX_TLS"]


def test_on_this_machine_ranks_see_the_packages_and_libraries_that_the_command_sees(tmp_path):
    launch = open_cluster.launch_here(Path(RUN), "m", "/usr/bin", tmp_path)
    user = {"LD_LIBRARY_PATH": "/nix/lib", "PYTHONPATH": "/me"}
    assert environment_of(launch, user) == launch.env | user and not launch.env.keys() & AS_DEPLOYED.keys()


def test_a_fork_server_is_started_directly_on_the_head_and_over_ssh_elsewhere():
    argv = launcher_argv(LAUNCH, 29500)
    assert list(argv) == ["te1", "te2", "te3"]
    program = [LAUNCH.python, "-u", "-m", "training.node.supervision.fork_server", "--run", RUN, "--node"]
    clean = ["env", "-i", f"SPOTUNE_RUN={RUN}", "PYTHONNOUSERSITE=1", "PYTHONDONTWRITEBYTECODE=1", *program]
    assert argv["te1"] == [*clean, "te1"]
    assert argv["te2"][0] == "ssh" and argv["te2"][-2:] == ["te2", f"cd {RUN} && {shlex.join(clean)} te2; exit $?"]


def test_torchruns_own_parser_takes_the_command_line_of_every_node():
    run = pytest.importorskip("torch.distributed.run", reason="needs the [train] extra")
    argv = launcher_argv(replace(LAUNCH, launcher="torchrun"), 29500)
    words = {host: shlex.split(line[-1].partition(";")[0]) if host != "te1" else line for host, line in argv.items()}
    told = {host: run.parse_args(line[line.index("torch.distributed.run") + 1 :]) for host, line in words.items()}
    places = {host: (each.nnodes, each.nproc_per_node, each.node_rank) for host, each in told.items()}
    assert places == {"te1": ("3", "1", 0), "te2": ("3", "2", 1), "te3": ("3", "1", 2)}
    assert {(each.master_addr, each.master_port, each.rdzv_backend) for each in told.values()} == {
        ("10.0.0.11", 29500, "static")
    }
    assert [each.training_script for each in told.values()] == ["training.node.supervision.rank_start"] * 3
    assert all(each.module and each.training_script_args == [RUN] for each in told.values())


@pytest.mark.parametrize(
    ("addresses", "network"),
    [
        (["10.0.0.11", "10.0.0.12", "10.0.0.13"], "10.0.0.8/29"),
        (["10.0.3.1", "10.0.0.254"], "10.0.0.0/22"),
        (["10.0.0.11"], "10.0.0.11/32"),
        (["fd00::1", "fd00::2"], "fd00::/126"),
    ],
)
def test_mpiruns_daemons_talk_in_the_smallest_network_of_all_nodes(addresses, network):
    assert network_of(addresses) == network


def test_mpirun_is_told_each_node_with_its_slots():
    (argv,) = launcher_argv(replace(LAUNCH, launcher="mpirun"), 29500).values()
    assert argv[0] == "/data/env/bin/mpirun" and argv[argv.index("--host") + 1] == "te1:1,te2:2,te3:1"
    assert {f"SPOTUNE_RUN={RUN}", "MASTER_ADDR=10.0.0.11", "MASTER_PORT=29500"} <= {*argv}


@pytest.mark.parametrize("named", ["", "mpirun"])
def test_lines_are_printed_for_launchers_that_are_started_on_each_node(named):
    assert parse_by_hand(None) is None and parse_by_hand("torchrun") == "torchrun"
    with pytest.raises(LaunchError, match=f"--print {named}"):
        parse_by_hand(named)


@pytest.mark.parametrize(("launcher", "files"), [("spotune", set()), ("deepspeed", {"hostfile", ".deepspeed_env"})])
def test_only_deepspeeds_launcher_reads_files_of_its_own(launcher, files):
    assert launch_files(replace(LAUNCH, launcher=launcher)).keys() == {LAUNCH_FILE, *files}


def test_deepspeeds_own_parser_takes_the_command_line():
    runner = pytest.importorskip("deepspeed.launcher.runner", reason="needs the [train] extra")
    arguments = runner.parse_args(deepspeed_argv(LAUNCH, 29500)[4:])
    assert arguments.user_script == "training.node.supervision.rank_start"
    assert arguments.user_args == [RUN]
    assert (arguments.module, arguments.no_local_rank, arguments.master_port) == (True, True, 29500)


def test_one_node_is_started_without_pdsh():
    argv = deepspeed_argv(replace(LAUNCH, hosts=HOSTS[1:2]), 29500)
    assert argv[3] == "deepspeed.launcher.launch"
    assert "--world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19" in argv  # {"localhost": [0, 1]}


def test_ranks_are_numbered_node_by_node():
    assert [LAUNCH.host_of(rank).name for rank in range(LAUNCH.world_size)] == ["te1", "te2", "te2", "te3"]


def test_launch_json_comes_back_as_it_was_written():
    assert parse_launch(launch_text(LAUNCH)) == LAUNCH


HOST = {"name": "te1", "private_address": "10.0.0.1", "slots": 1}


@pytest.mark.parametrize(
    "changed",
    [
        {"hosts": [HOST | {"slots": "many"}]},
        {"hosts": [HOST | {"name": 5}]},
        {"hosts": [HOST | {"price_h": "abc"}]},
        {"hosts": 3},
        {"env": {"A": 1}},
        {"stop_grace_s": None},
    ],
    ids=str,
)
def test_a_launch_with_a_value_of_another_kind_is_none(changed):
    with pytest.raises(ValueError, match="no launch"):
        parse_launch(json.dumps(json.loads(launch_text(LAUNCH)) | changed))


def test_a_stop_of_the_unit_reaches_only_the_supervisor_and_waits_for_the_grace():
    argv = unit_argv(LAUNCH)
    assert argv[:4] == ["systemd-run", "--unit=spotune-tiny-20260131-154500", "--collect", "--quiet"]
    assert "--property=KillMode=mixed" in argv
    assert "--property=TimeoutStopSec=14400" in argv, "it starts before the plan says how long a stop may take"
    assert unit_argv(LAUNCH, early=True) == [*argv, "--early"]
    assert argv[-6:] == ["/data/env/bin/python", "-u", "-m", "training.node.supervision.supervise", "--run", RUN]
