"""conda on a node: which installer, from where, and the shell that installs it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.node_files import shell
from deploy.refusal import REFUSED


@dataclass(frozen=True)
class Installer:
    """A conda installer for Linux x86_64, pinned."""

    file: str
    sha256: str
    url: str
    """The release it belongs to."""


INSTALLERS = {
    "miniforge": Installer(
        file="Miniforge3-26.3.2-3-Linux-x86_64.sh",
        sha256="848194851a98903134187fbb4ab50efe87b003e0c0f808f97644b7524a62bf2c",
        url="https://github.com/conda-forge/miniforge/releases/download/26.3.2-3",
    ),
    "miniconda": Installer(
        file="Miniconda3-py312_26.3.2-2-Linux-x86_64.sh",
        sha256="32673413a39a21ae3997c9b38236e9df15c9fcef930b510487c64fe259e03f95",
        url="https://repo.anaconda.com/miniconda",
    ),
}
PYTHON_LOCK = Path(__file__).with_name("conda-python.lock")
# How the Chinese mirrors of Miniforge's releases name a release's folder.
MIRRORED_RELEASE = "Release%2026.3.2-3"
LICENCE_NOTE = (
    "Miniconda's installer and its default channel need a paid licence in organisations above 200 people. "
    'Packages are taken from conda-forge all the same; distribution = "miniforge" needs no licence.'
)


def install_command(installer: Installer, urls: list[str], prefix: str) -> str:
    """Shell that installs conda where this very one is not: the first source whose file has the pinned sha256."""
    pinned = {"file": installer.file, "sha256": installer.sha256, "urls": " ".join(urls)}
    return shell("install_conda.sh", prefix=prefix, **pinned, refused=REFUSED)


def installer_urls(distribution: str, mirror: str) -> list[str]:
    """Where the installer may come from, the mirror first; its sha256 decides, not where it comes from."""
    installer = INSTALLERS[distribution]
    own = f"{installer.url}/{installer.file}"
    if distribution != "miniforge" or not mirror:
        return [own]
    return [f"{mirror.rstrip('/')}/{MIRRORED_RELEASE}/{installer.file}", own]


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
