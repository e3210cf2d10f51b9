"""A control group of its own for every host: which processes are its, their end, their share of the cores.

systemd-nspawn puts its payload into `<its own cgroup>/payload`. Hosts started from one shell would share that
group and the systemd of each would meddle with the others' services, so every host starts in its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from inventory.localcloud.commands import MOUNTINFO, LocalCloudError, mounts_of
from inventory.localcloud.places import Places

KILL_TIMEOUT_S = 15
PERIOD_US = 10_000
"""Of a CPU quota: short, so that ranks that wait for each other stand still for milliseconds, not for the default tenth
of a second."""
NO_QUOTAS = "this machine's kernel keeps no CPU quotas (CFS bandwidth), so --cpu cannot be had; leave it out"


def systemd_trees(mountinfo: str) -> tuple[Path, ...]:
    """Where the trees systemd works in are mounted: cgroup2, and name=systemd on older layouts. Pure."""
    trees = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        filesystem, _, options = after.split(" ", 2)
        if filesystem == "cgroup2" or (filesystem == "cgroup" and "name=systemd" in options.split(",")):
            trees.append(Path(before.split()[4]))
    return tuple(trees)


@dataclass(frozen=True)
class CpuTree:
    """Where the CPU's quotas are kept."""

    root: Path
    unified: bool
    """cgroup2's, which systemd works in too; else a tree of the cpu controller alone, or with others of its age."""


def cpu_tree(mountinfo: str) -> CpuTree | None:
    """The tree that has the cpu controller: an older one of its own, else cgroup2's. Pure."""
    unified = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        filesystem, _, options = after.split(" ", 2)
        if filesystem == "cgroup" and "cpu" in options.split(","):
            return CpuTree(Path(before.split()[4]), unified=False)
        if filesystem == "cgroup2":
            unified = CpuTree(Path(before.split()[4]), unified=True)
    return unified


def roots() -> tuple[Path, ...]:
    """The trees of this machine that systemd works in; empty where there are none."""
    return systemd_trees(MOUNTINFO.read_text()) if MOUNTINFO.exists() else ()


def folders(group: str) -> tuple[Path, ...]:
    """A group's folder in each of systemd's trees, there or not."""
    return tuple(root / group for root in roots())


def _all_roots() -> tuple[Path, ...]:
    """systemd's trees, and the one of CPU quotas where that is another."""
    tree = cpu_tree(MOUNTINFO.read_text()) if MOUNTINFO.exists() else None
    return (*roots(), *([tree.root] if tree and not tree.unified else []))


def groups_named(prefix: str) -> tuple[str, ...]:
    """The groups at the top of the trees whose name starts so."""
    return tuple(sorted({path.name for root in _all_roots() for path in root.glob(f"{prefix}*")}))


def pids(group: str) -> set[int]:
    """The processes in a group and below."""
    return {
        int(line)
        for root in _all_roots()
        for folder, _, _ in os.walk(root / group)  # passes by what goes meanwhile: a session that ends takes its group
        for line in _read(Path(folder, "cgroup.procs")).split()
        if line != "0"  # a process of another pid namespace
    }


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the group went while we looked
        return ""


def kill(group: str) -> None:
    """End every process of a group at once, as a power cut does, and wait until they are gone."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := pids(group):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise LocalCloudError(f"{group}: these processes do not end: {sorted(left)}")
        time.sleep(0.05)


def remove(group: str) -> None:
    """Remove a group without processes, and those below it."""
    for top in (root / group for root in _all_roots()):
        for folder, _, _ in os.walk(top, topdown=False):
            with suppress(FileNotFoundError):  # systemd removes what is empty, too
                Path(folder).rmdir()


def limit_cpu(group: str, cores: float | None) -> None:
    """Let a running group's processes have so many cores together; None: all. Raises LocalCloudError."""
    tree = cpu_tree(MOUNTINFO.read_text()) if MOUNTINFO.exists() else None
    if cores is None and cpu_limit(group) is None:
        return
    if tree is None or not _has_quotas(tree):
        raise LocalCloudError(NO_QUOTAS)
    folder, quota = tree.root / group, round((cores or 0) * PERIOD_US)
    if tree.unified:
        (tree.root / "cgroup.subtree_control").write_text("+cpu\n")
        (folder / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_US}\n")
    elif quota:
        folder.mkdir(exist_ok=True)
        (folder / "cpu.cfs_period_us").write_text(f"{PERIOD_US}\n")
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        _move(lambda: pids(group) - _in(folder), folder)
    else:
        _move(lambda: _in(folder), tree.root)
        folder.rmdir()


def _has_quotas(tree: CpuTree) -> bool:
    if tree.unified:
        return "cpu" in (tree.root / "cgroup.controllers").read_text().split()
    return (tree.root / "cpu.cfs_quota_us").exists()


def _in(folder: Path) -> set[int]:
    return {int(line) for line in _read(folder / "cgroup.procs").split()}


def _move(left: Callable[[], set[int]], folder: Path) -> None:
    """Move processes between groups of a tree that systemd does not work in, and those that they start meanwhile. Only
    a host with a quota has a group there: the others compete as any other program does."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while pids := left():
        for pid in pids:
            try:
                (folder / "cgroup.procs").write_text(f"{pid}\n")
            except ProcessLookupError:
                continue
            except OSError as error:
                raise LocalCloudError(f"process {pid} does not go into {folder}: {error.strerror}") from None
        if time.monotonic() > deadline:
            raise LocalCloudError(f"these processes do not go into {folder}: {sorted(pids)}")


def cpu_limit(group: str) -> float | None:
    """The cores that a group may have; None where nothing limits it."""
    tree = cpu_tree(MOUNTINFO.read_text()) if MOUNTINFO.exists() else None
    if tree is None:
        return None
    if tree.unified:
        quota, _, period = _read(tree.root / group / "cpu.max").partition(" ")
    else:
        quota, period = (_read(tree.root / group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.strip() not in ("", "max", "-1") else None


# The script is a file of its own in the host, so that it is in nobody's list of processes.
RUN_SCRIPT = 'f=$(mktemp) && cat >"$f" && { sh "$f" </dev/null 2>&1; code=$?; rm -f "$f"; exit $code; }'
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def leader(places: Places, name: str) -> int | None:
    """The host's first process, by its id here; None where it has none, as between two boots."""
    for pid in pids(places.group(name)):
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
    if (pid := leader(places, name)) is None:
        raise LocalCloudError(f"{name} does not run")
    return ["nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--", "env", "-i", PATH]


def mounts_from(leader: int, device: str) -> list[Path]:
    """Where a loop device and its partitions are mounted in the host of a first process, the newest first; as the host
    sees it."""
    folder = Path("/sys/block") / device
    numbers = {file.read_text().strip() for file in [folder / "dev", *folder.glob(f"{device}p*/dev")] if file.exists()}
    mountinfo = Path(f"/proc/{leader}/mountinfo").read_text()
    return mounts_of(mountinfo, numbers)
