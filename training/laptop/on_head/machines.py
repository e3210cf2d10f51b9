"""Models and machines of a cluster, as its head sees them."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from training.laptop.on_head.fs import StrPath, exists, names, run, small

CONFIG, WEIGHTS = "config.json", ".safetensors"
CARDS_S = 30.0
"""A driver without persistence wakes every card first."""
REACH = ("timeout", "20", "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")


class ModelAnswer(TypedDict):
    gone: list[str]
    """Files elsewhere that links of it lead to and that are not there."""
    whole: bool
    """Whether it has weights and a configuration."""


class HardwareAnswer(TypedDict):
    cards: list[str]
    """Of each its name and MiB, as nvidia-smi says them."""
    ram_bytes: int
    disk_free: int | None
    """Bytes; None where no disk was asked about."""


class NodesAnswer(TypedDict):
    own: HardwareAnswer
    others: dict[str, HardwareAnswer]
    """Of those that answer."""


class RoomAnswer(TypedDict):
    model_bytes: int
    card_free: int | None
    """Bytes of the first card; None where there is none."""


def now() -> float:
    """Seconds since 1970, by this machine's clock."""
    return time.time()


def unresolved(hosts: list[str]) -> list[str]:
    """Of some names those that have no address here."""
    return [host for host in hosts if not _resolves(host)]


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def model(folder: StrPath) -> ModelAnswer:
    """Whether a model's files are there, of which some may be links."""
    paths = [Path(folder, name) for name in names(folder) if not name.startswith(".")]
    return {
        "gone": [str(path.readlink()) for path in paths if path.is_symlink() and not exists(path)],
        "whole": exists(Path(folder, CONFIG)) and any(path.suffix == WEIGHTS for path in paths),
    }


def room(models: list[str]) -> RoomAnswer:
    """How large models are together, and what is free of the first card."""
    weights = [Path(folder, name) for folder in models for name in names(folder) if name.endswith(WEIGHTS)]
    free = [int(mib) << 20 for line in cards("memory.free") if (mib := line.strip()).isdecimal()]
    return {"model_bytes": sum(path.stat().st_size for path in weights), "card_free": free[0] if free else None}


def cards(what: str) -> list[str]:
    """A line for each; none where nvidia-smi fails, whatever it says then."""
    try:
        done = run("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", timeout_s=CARDS_S)
    except OSError:
        return []
    return [] if done.returncode else done.stdout.splitlines()


def hardware(disk: str) -> HardwareAnswer:
    """What this machine has; `disk`: where runs lie."""
    ram = re.search(r"MemTotal: *([0-9]+)", small("/proc/meminfo"))
    space = os.statvfs(disk) if disk and exists(disk) else None
    return {
        "cards": cards("name,memory.total"),
        "ram_bytes": int(ram[1]) << 10 if ram else 0,
        "disk_free": space.f_bavail * space.f_frsize if space else None,
    }


def hardware_of_all(hosts: list[str], disk: str, boot: list[str], code: str) -> NodesAnswer:
    """What this machine and other nodes have. `boot`, `code`: the command that runs this code there, and its first
    line."""
    question = json.dumps({"verb": hardware.__name__, "arguments": [disk], "named": {}})

    def ask(host: str) -> HardwareAnswer | None:
        try:
            said = run(*REACH, host, shlex.join(boot), input_text=f"{code}\n{question}\n").stdout
            piece = next(line for line in said.splitlines() if line.startswith('{"piece"'))
            answer = json.loads(json.loads(piece)["piece"])["answer"]
            free = answer["disk_free"]
            return {
                "cards": [str(each) for each in answer["cards"]],
                "ram_bytes": int(answer["ram_bytes"]),
                "disk_free": None if free is None else int(free),
            }
        except (OSError, KeyError, RecursionError, StopIteration, TypeError, ValueError):
            return None

    with ThreadPoolExecutor(len(hosts) + 1) as pool:
        own, others = pool.submit(hardware, disk), {host: pool.submit(ask, host) for host in hosts}
    return {"own": own.result(), "others": {host: found for host, each in others.items() if (found := each.result())}}


VERBS = (now, unresolved, model, room, hardware, hardware_of_all)
