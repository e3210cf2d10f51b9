"""Every Python package a host installs, downloaded once and shown read-only to all of them."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from inventory.localcloud.commands import LocalCloudError, Report, attempt, run
from inventory.localcloud.mounts import made_once
from inventory.localcloud.places import cache_folder

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where torch's CPU wheels are published; asked only when the caller's own sources have none."""
GLIBC_MINORS = (36, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""manylinux tags that fit Debian 12 (glibc 2.36)."""


def folder() -> Path:
    """All wheelhouses, one a key."""
    return cache_folder() / "wheelhouse"


def key(requirements: str, python_version: str) -> str:
    """The name of a wheelhouse in the cache. Pure."""
    content = f"{requirements}\n{python_version}\n{platform.machine()}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def wanted(requirements: str, python_version: str) -> tuple[str, ...]:
    """The requirements that count on a host with this Python, markers evaluated. Pure.

    pip evaluates markers for the Python it runs on, which may be another than the host's.
    """
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.0"}
    lines = [line.split("#")[0].strip() for line in requirements.splitlines()]
    parsed = [Requirement(line) for line in lines if line]
    return tuple(f"{r.name}{r.specifier}" for r in parsed if r.marker is None or r.marker.evaluate(environment))


def download_command(target: Path, python_version: str, *what: str) -> list[str]:
    """The pip command that fetches wheels for a host, a source archive where there is no wheel. Pure."""
    machine = platform.machine()
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS]
    platforms += [f"--platform=manylinux2014_{machine}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={target}"]
    return [*command, f"--python-version={python_version}", *platforms, *what]


def ensure_wheelhouse(requirements: str, python_version: str, report: Report) -> Path:
    """The folder with a file for each requirement; downloaded where it is not cached. Raises LocalCloudError.

    `requirements`: pinned lines without hashes. torch is taken as its CPU wheel. pip's own configuration
    (index, find-links, certificates) is the caller's.
    """

    def fill(target: Path) -> None:
        report("downloading the Python packages (once; about 300 MB)")
        _fill(target, wanted(requirements, python_version), python_version)

    return made_once(folder() / key(requirements, python_version), fill)


def _fill(target: Path, lines: Sequence[str], python_version: str) -> None:
    torch = [line for line in lines if line.startswith("torch==")]
    run(*download_command(target, python_version, *(line for line in lines if line not in torch)))
    for pin in torch:
        cpu = f"{pin}+cpu"
        configured = attempt(*download_command(target, python_version, cpu))
        if configured.returncode != 0:
            _from_torch_index(target, python_version, cpu)


def _from_torch_index(target: Path, python_version: str, pin: str) -> None:
    try:
        run(*download_command(target, python_version, f"--index-url={TORCH_CPU_INDEX}", pin))
    except LocalCloudError as error:
        raise LocalCloudError(
            f"no {pin} in pip's configured sources nor at {TORCH_CPU_INDEX}; "
            f"put its wheel into a folder and set PIP_FIND_LINKS to it\n{error}"
        ) from error
