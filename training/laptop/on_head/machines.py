"""Models and machines of a cluster, as its head sees them."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from training.laptop.on_head.fs import StrPath, names, text

CONFIG, WEIGHTS = "config.json", ".safetensors"
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
    paths = [Path(folder, name) for name in names(folder)]
    return {
        "gone": [str(path.readlink()) for path in paths if not path.exists()],
        "whole": Path(folder, CONFIG).exists() and any(path.suffix == WEIGHTS for path in paths),
    }


def room(models: list[str]) -> RoomAnswer:
    """How large models are together, and what is free of the first card."""
    weights = [Path(folder, name) for folder in models for name in names(folder) if name.endswith(WEIGHTS)]
    free = [int(mib) << 20 for line in cards("memory.free") if (mib := line.strip()).isdigit()]
    return {"model_bytes": sum(path.stat().st_size for path in weights), "card_free": free[0] if free else None}


def cards(what: str) -> list[str]:
    """A line for each; none where nvidia-smi fails, whatever it says then."""
    argv = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return []
    return [] if done.returncode else done.stdout.decode("utf-8", "replace").splitlines()


def hardware(disk: str) -> HardwareAnswer:
    """What this machine has; `disk`: where runs lie."""
    ram = re.search(r"MemTotal: *([0-9]+)", text("/proc/meminfo") or "")
    space = os.statvfs(disk) if disk and Path(disk).exists() else None
    return {
        "cards": cards("name,memory.total"),
        "ram_bytes": int(ram[1]) << 10 if ram else 0,
        "disk_free": space.f_bavail * space.f_frsize if space else None,
    }


def hardware_of(hosts: list[str], disk: str, boot: list[str], code: str) -> dict[str, HardwareAnswer]:
    """Of other nodes, those that answer. `boot`, `code`: the command that runs this code there, and its first line."""
    question = json.dumps({"verb": hardware.__name__, "arguments": [disk], "named": {}})

    def ask(host: str) -> HardwareAnswer | None:
        command = [*REACH, host, shlex.join(boot)]
        lines = f"{code}\n{question}\n".encode()
        done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        answers = [json.loads(line)["piece"] for line in done.stdout.splitlines() if line.startswith(b'{"piece"')]
        found: HardwareAnswer | None = json.loads(answers[0]).get("answer") if answers else None
        return found

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        answers = {host: pool.submit(ask, host) for host in hosts}
    return {host: answer for host, each in answers.items() if (answer := each.result())}
