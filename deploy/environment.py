"""The Python environment that cluster.toml asks for, as values: packages, interpreter, sources. Pure.

requirements.lock is made by uv for CUDA machines: every line with its hashes. The CPU wheel of torch is
another file than the one the lock names, and hash checking is all or nothing within one install; so a CPU
node installs in two steps: all the rest hashed, then torch by its version and the hash in PyTorch's own index.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.node_files import REFUSED, shell
from inventory.settings import Mirrors, Settings

CUDA_ONLY = re.compile(r"^(nvidia|cuda)-|^triton$|^liger-kernel$")


def requirements(lock_text: str) -> Iterator[tuple[str, str]]:
    """(name, requirement with its hashes) of each pinned package; comments left out."""
    entry: list[str] = []
    for line in [*lock_text.splitlines(), ""]:
        if line.lstrip().startswith("#"):
            continue
        if entry and not line.startswith(" "):
            yield entry[0].partition("==")[0].lower(), "\n".join(entry)
            entry = []
        if line.strip():
            entry.append(line)


def hashed_requirements(lock_text: str, flavour: str) -> str:
    """What one hash-checked install gets: the whole lock, or on "cpu" all but torch and CUDA."""
    return _lines(text for name, text in requirements(lock_text) if flavour == "cuda" or _on_cpu(name))


def cpu_requirements(lock_text: str) -> str:
    """Every package of a CPU node, torch by its version alone: what a wheelhouse for such nodes holds."""
    return _lines([*(_without_hashes(t) for n, t in requirements(lock_text) if _on_cpu(n)), torch_pin(lock_text)])


def one_requirement(lock_text: str, name: str) -> str:
    """A single package with its hashes; KeyError when the lock has none."""
    return dict(requirements(lock_text))[name] + "\n"


def torch_pin(lock_text: str) -> str:
    """`torch==VERSION`, without hashes."""
    return _without_hashes(one_requirement(lock_text, "torch"))


def lock_hash(text: str) -> str:
    """sha256 of what the lock pins: its comments and blank lines do not count."""
    pins = "\n".join(sorted(entry for _, entry in requirements(text)))
    return hashlib.sha256(pins.encode()).hexdigest()


def _lines(entries: Iterator[str] | list[str]) -> str:
    return "".join(f"{entry}\n" for entry in entries)


def _without_hashes(entry: str) -> str:
    return entry.splitlines()[0].removesuffix("\\").rstrip()


def _without(lock_text: str, left_out: str) -> str:
    return _lines(text for name, text in requirements(lock_text) if name != left_out)


def _on_cpu(name: str) -> bool:
    return name != "torch" and not CUDA_ONLY.match(name)


# conda on a node: which installer, from where, and the shell that installs it.

RELEASE = "26.3.2-3"
"""Of Miniforge."""
RELEASE_URL = f"https://github.com/conda-forge/miniforge/releases/download/{RELEASE}"
INSTALLER = f"Miniforge3-{RELEASE}-Linux-x86_64.sh"
INSTALLER_SHA256 = "848194851a98903134187fbb4ab50efe87b003e0c0f808f97644b7524a62bf2c"
NO_INTERNET = (
    "it needs a way to the internet; [mirrors] in cluster.toml takes other places, preset = china those in China"
)
PYTHON_LOCK = Path(__file__).with_name("conda-python.lock")


def install_command(urls: list[str], prefix: str) -> str:
    """Shell that installs conda where this very one is not: the first source whose file has the pinned sha256."""
    pinned = {"file": INSTALLER, "sha256": INSTALLER_SHA256}
    return shell("install_conda.sh", prefix=prefix, urls=" ".join(urls), **pinned, refused=REFUSED)


def installer_urls(mirror: str) -> list[str]:
    """Where the installer may come from, the mirror first; its sha256 decides, not where it comes from."""
    own = f"{RELEASE_URL}/{INSTALLER}"
    # how the Chinese mirrors of Miniforge's releases name a release's folder
    return [f"{mirror.rstrip('/')}/Release%20{RELEASE}/{INSTALLER}", own] if mirror else [own]


def condarc(mirror: str) -> str:
    """conda's configuration: conda-forge alone, through the mirror if there is one."""
    lines = ["channels: [conda-forge]", "channel_priority: strict", "auto_update_conda: false"]
    lines += ["remote_max_retries: 6"]
    if mirror:
        lines += ["custom_channels:", f"  conda-forge: {mirror.rstrip('/')}"]
    return "\n".join(lines) + "\n"


def explicit_list(mirror: str) -> str:
    """The list that `conda create --file` installs Python from: conda takes these very files, each by its sha256."""
    channel = f"{mirror.rstrip('/') or 'https://conda.anaconda.org'}/conda-forge"
    lines = PYTHON_LOCK.read_text(encoding="utf-8").splitlines()
    return "\n".join(["@EXPLICIT", *(f"{channel}/{line}" for line in lines if not line.startswith("#")), ""])


LOCK = Path(__file__).with_name("requirements.lock")
BUILD_VERSION = 1
"""Raise it when the commands below build something else from the same lock."""


@dataclass(frozen=True)
class Environment:
    """What the settings ask for."""

    provider: str
    flavour: str
    lock: str
    mirrors: Mirrors
    wheelhouse: str

    @property
    def hash(self) -> str:
        """Changes when the environment has to be built again; mirrors do not count."""
        python = explicit_list("") if self.provider == "conda" else "system"
        parts = [BUILD_VERSION, self.provider, python, self.flavour, lock_hash(self.lock)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def environment_from(settings: Settings, lock: str) -> Environment:
    """The environment cluster.toml asks for."""
    return Environment(
        provider=settings.python_provider,
        flavour=settings.torch_flavour,
        lock=lock if settings.launch.launcher == "mpirun" else _without(lock, "openmpi"),
        mirrors=settings.mirrors.resolved(),
        wheelhouse=settings.python.wheelhouse,
    )
