"""What the local cloud needs of this machine, and the command that supplies what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from inventory.localcloud.commands import LocalCloudError, attempt
from inventory.localcloud.inside import roots

PACKAGE_OF_PROGRAM = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "ip": "iproute2",
    "losetup": "mount",
    "ssh-keygen": "openssh-client",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}
"""Program or file -> the Debian and Ubuntu package it comes in."""


@dataclass(frozen=True)
class Machine:
    """What was found on this machine."""

    system: str
    is_root: bool
    programs: frozenset[str]
    has_overlay: bool
    has_loop: bool
    has_cgroups: bool


def missing(machine: Machine) -> tuple[str, ...]:
    """One sentence for each thing that is not there; empty where the local cloud can run. Pure."""
    if machine.system != "Linux":
        return (f"it runs on Linux only, and this is {machine.system}",)
    return tuple(_missing_on_linux(machine))


def _missing_on_linux(machine: Machine) -> Iterable[str]:
    if not machine.is_root:
        yield "it needs root: run the same command through sudo"
    absent = [name for name in PACKAGE_OF_PROGRAM if name not in machine.programs]
    if absent:
        yield f"not installed: {', '.join(absent)}; run: {install_command(absent)}"
    if not machine.has_overlay:
        yield "the kernel has no overlayfs; run: modprobe overlay"
    if not machine.has_loop:
        yield "there is no /dev/loop-control; run: modprobe loop"
    if not machine.has_cgroups:
        yield "no cgroup tree for systemd is mounted under /sys/fs/cgroup, as in many containers"


def install_command(programs: Collection[str]) -> str:
    """The command that installs the packages of these programs."""
    packages = sorted({PACKAGE_OF_PROGRAM[name] for name in programs})
    return f"apt-get install -y {' '.join(packages)}"


def probe() -> Machine:
    """Look at this machine."""
    is_root = os.geteuid() == 0
    if is_root and shutil.which("modprobe"):
        attempt("modprobe", "--all", "--quiet", "overlay", "loop")
    filesystems = Path("/proc/filesystems")
    return Machine(
        system=platform.system(),
        is_root=is_root,
        programs=frozenset(name for name in PACKAGE_OF_PROGRAM if _is_there(name)),
        has_overlay=filesystems.exists() and "\toverlay\n" in filesystems.read_text(),
        has_loop=Path("/dev/loop-control").exists(),
        has_cgroups=bool(roots()),
    )


def _is_there(name: str) -> bool:
    return Path(name).exists() if name.startswith("/") else shutil.which(name) is not None


def missing_prerequisites() -> tuple[str, ...]:
    """What is missing on this machine, a sentence each."""
    return missing(probe())


def require() -> None:
    """Raise LocalCloudError naming everything that is missing."""
    problems = missing_prerequisites()
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise LocalCloudError(f"the local cloud cannot run here:{lines}")
