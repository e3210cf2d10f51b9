"""The environment of a run's ranks: the same on every node, whatever a login there brings. Pure, standard library
only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from training.run.events import RUN_VARIABLE

ENV_FOLDER = "/data/env"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VISIBLE = "CUDA_VISIBLE_DEVICES"
AS_DEPLOYED = {
    "PYTHONNOUSERSITE": "1",  # what `pip install --user` left in root's home
    "PYTHONHOME": "",
    "LD_LIBRARY_PATH": "",
    "LD_PRELOAD": "",
}
"""On nodes, Python runs what was deployed and nothing else; an empty value is as good as none."""
_OF_NODE = {
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),  # for wandb
}
"""What a node may add. /etc/nccl.conf has room for all that NCCL and its network plugins read."""
_OF_LOGIN = re.compile(
    "_|PWD|OLDPWD|SHLVL|TERM|MAIL|MOTD_SHOWN|LS_COLORS|LESS(OPEN|CLOSE)|(SSH|DBUS|LC|XDG_SESSION)_.*|XDG_RUNTIME_DIR"
)
"""What every login over ssh has."""


def env_on_node(env: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment on a node: of what the node itself has (`environ`) the little that it may add, and the run's
    `env`."""
    return {name: environ[name] for name in environ if name in _OF_NODE} | dict(env)


def left_out(env: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """What else the node has, by name: its ranks do not get it."""
    return sorted(name for name in environ.keys() - env_on_node(env, environ) if not _OF_LOGIN.fullmatch(name))


def parse_etc_environment(text: str) -> dict[str, str]:
    """What /etc/environment sets, read as pam_env reads it: NAME=VALUE lines, quotes around a value left away."""
    settings = {}
    for line in text.splitlines():
        name, equals, value = line.partition("#")[0].strip().removeprefix("export ").partition("=")
        if equals and name.strip():
            settings[name.strip()] = value.strip().strip("\"'")
    return settings


def rank_env(run_dir: str, torch: Literal["cpu", "cuda"]) -> dict[str, str]:
    """What every rank has in its environment.

    NCCL reads /etc/nccl.conf by itself, and gloo's interface is set at rank start from the node's own
    /etc/spotune/node.json, because interfaces may be called differently on each node.
    """
    env = {
        **AS_DEPLOYED,
        "PATH": f"{ENV_FOLDER}/bin:{SYSTEM_PATH}",  # torch looks for ninja there
        "TORCH_EXTENSIONS_DIR": f"{ENV_FOLDER}/torch_extensions",
        "OMP_NUM_THREADS": "1" if torch == "cpu" else "4",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # the shipped code stays as it was shipped
        "DS_ENV_FILE": f"{run_dir}/.deepspeed_env",  # root's home may have a .deepspeed_env too
        RUN_VARIABLE: run_dir,
    }
    if torch == "cpu":
        # oneDNN keeps 1024 compiled kernels, and rows of many lengths each make theirs: a layer needs some dozens
        return env | {"DS_ACCELERATOR": "cpu", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    stem = flight_recorder_stem(run_dir)
    return env | {
        "DS_ACCELERATOR": "cuda",  # a node whose driver is broken fails, instead of training on its CPU
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # rows of many lengths would leave holes no row fits into
        "NCCL_DEBUG": "INFO",  # some lines a rank at the start, for `fab logs --facts`
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its old name, which the pipe still asks for
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem,
    }


def debug_env() -> dict[str, str]:
    """What a run with a debugger needs besides: `breakpoint()` goes there, and does nothing where none is attached;
    NCCL's own watch must not end ranks that wait for the one that is stopped."""
    return {
        "PYTHONBREAKPOINT": "debugpy.breakpoint",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # its warning is about the standard library only
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }


def flight_recorder_stem(run_dir: str) -> str:
    """Where NCCL's flight recorder writes, the rank's number appended."""
    return f"{run_dir}/logs/nccl-trace-"


def here_env(run_dir: str, python_folder: str, path: str, cuda: bool, home: str) -> dict[str, str]:
    """What ranks on this machine have in their environment: its own Python, the loopback interface."""
    env = rank_env(run_dir, "cuda" if cuda else "cpu")
    return {name: value for name, value in env.items() if name not in AS_DEPLOYED} | {
        "PATH": f"{python_folder}:{path}",
        "TORCH_EXTENSIONS_DIR": f"{home}/.cache/spotune/torch_extensions",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
