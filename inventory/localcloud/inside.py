"""Reaching into a running host from the machine it runs on, without its network: commands, mounts."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from inventory.localcloud import cgroups
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.mounts import mounts_of
from inventory.localcloud.places import Places

# The script is a file of its own in the host, so that it is in nobody's list of processes.
RUN_SCRIPT = 'f=$(mktemp) && cat >"$f" && { sh "$f" </dev/null 2>&1; code=$?; rm -f "$f"; exit $code; }'
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def runs(places: Places, name: str) -> bool:
    """Whether the host has a first process."""
    return _leader(places, name) is not None


def leader(places: Places, name: str) -> int:
    """The host's first process, by its id here. Raises LocalCloudError where the host does not run."""
    if (pid := _leader(places, name)) is None:
        raise LocalCloudError(f"{name} does not run")
    return pid


def _leader(places: Places, name: str) -> int | None:
    for pid in cgroups.pids(places.group(name)):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it went while we looked
            continue
        if re.search(r"^NSpid:\t\d+\t1$", status, re.MULTILINE):
            return pid
    return None


def call(places: Places, name: str, *argv: str, timeout_s: float) -> str:
    """Run a program in a host as root; its output. Raises LocalCloudError."""
    command = [*_enter(places, name), "timeout", "--kill-after=2", str(timeout_s), *argv]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split()[-40:])
        raise LocalCloudError(f"{name}: {argv[0]} ended with code {done.returncode}: {words or 'it gave no reason'}")
    return done.stdout


def run_script(places: Places, name: str, script: str, timeout_s: float) -> tuple[int, bytes]:
    """Run a shell script in a host as a service of its own; exit code and output. Raises TimeoutError."""
    command = [
        *_enter(places, name),
        *("systemd-run", "--quiet", "--pipe", "--wait", "--collect", "--working-directory=/root"),
        *("--setenv=HOME=/root", f"--setenv={PATH}", f"--property=RuntimeMaxSec={timeout_s:.0f}"),
        "--property=IgnoreSIGPIPE=no",  # as in any other shell
        *("/bin/sh", "-c", RUN_SCRIPT),
    ]
    began = time.monotonic()
    try:
        # A margin: the host's own systemd ends what takes too long.
        done = subprocess.run(
            command,
            input=script.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=timeout_s + 30,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{name}: the script did not end within {timeout_s:.0f} s") from None
    if done.returncode != 0 and time.monotonic() - began >= timeout_s:
        raise TimeoutError(f"{name}: the script did not end within {timeout_s:.0f} s")
    return done.returncode, done.stdout


def _enter(places: Places, name: str) -> list[str]:
    pid = leader(places, name)
    return ["nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--", "env", "-i", PATH]


def mounts_from(places: Places, name: str, device: str) -> list[Path]:
    """Where a loop device and its partitions are mounted in a host, the newest first; as the host sees it."""
    folder = Path("/sys/block") / device
    numbers = {file.read_text().strip() for file in [folder / "dev", *folder.glob(f"{device}p*/dev")] if file.exists()}
    mountinfo = Path(f"/proc/{leader(places, name)}/mountinfo").read_text()
    return mounts_of(mountinfo, numbers)
