"""What the local cloud needs of this machine, and the command that supplies what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Collection, Iterable
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
FILESYSTEMS, LOOP = Path("/proc/filesystems"), Path("/dev/loop-control")


def missing_prerequisites() -> tuple[str, ...]:
    """One sentence for each thing that is not on this machine; empty where the local cloud can run."""
    if (system := platform.system()) != "Linux":
        return (f"it runs on Linux only, and this is {system}",)
    return tuple(_missing_on_linux())


def _missing_on_linux() -> Iterable[str]:
    if os.geteuid() != 0:
        yield "it needs root: run the same command through sudo"
    elif shutil.which("modprobe"):
        attempt("modprobe", "--all", "--quiet", "overlay", "loop")
    absent = [name for name in PACKAGE_OF_PROGRAM if not _is_there(name)]
    if absent:
        yield f"not installed: {', '.join(absent)}; run: {install_command(absent)}"
    if "\toverlay\n" not in FILESYSTEMS.read_text():
        yield "the kernel has no overlayfs; run: modprobe overlay"
    if not LOOP.exists():
        yield "there is no /dev/loop-control; run: modprobe loop"
    if not roots():
        yield "no cgroup tree for systemd is mounted under /sys/fs/cgroup, as in many containers"


def install_command(programs: Collection[str]) -> str:
    """The command that installs the packages of these programs."""
    packages = sorted({PACKAGE_OF_PROGRAM[name] for name in programs})
    return f"apt-get install -y {' '.join(packages)}"


def _is_there(name: str) -> bool:
    return Path(name).exists() if name.startswith("/") else shutil.which(name) is not None


def require() -> None:
    """Raise LocalCloudError naming everything that is missing."""
    problems = missing_prerequisites()
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise LocalCloudError(f"the local cloud cannot run here:{lines}")
