"""The base image, a bare Debian 12 as a cloud would boot it, cached by content; the wheels that hosts install from."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

from inventory.localcloud.commands import LocalCloudError, Report, attempt, made_once, run
from inventory.localcloud.places import cache_folder

FILES = Path(__file__).parent / "image_files"
TOOLS = Path("usr/local/lib/localcloud")
"""Where the image keeps what the local cloud itself runs in a host."""
PYTHON_VERSION = "3.11"
"""Of Debian 12: what the hosts' wheels are for."""
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)

# What the vendors' cloud images have and the deploy may rely on: ssh, Python, systemd.
# Nothing else, so that a step that forgets to install what it needs fails here and not at the user's.
PACKAGES = (
    "ca-certificates", "curl", "dbus", "iproute2", "iputils-ping", "kmod", "libpam-systemd",
    "openssh-server", "procps", "python3", "python3-venv", "sudo", "systemd", "systemd-sysv", "udev",
)  # fmt: skip


@dataclass(frozen=True)
class ImageRecipe:
    """All that decides what an image holds."""

    suite: str = "bookworm"
    mirror: str = ""
    packages: tuple[str, ...] = PACKAGES
    certificates: tuple[str, ...] = ()
    """Certificate authorities this machine trusts beside Debian's, as PEM."""
    layout: int = 1
    """Raised when `_make_bare` changes."""

    def key(self) -> str:
        """The name of the image in the cache."""
        content = json.dumps(asdict(self), sort_keys=True).encode()
        files = b"".join(path.read_bytes() for path in sorted(FILES.iterdir()) if path.is_file())
        return hashlib.sha256(content + files).hexdigest()[:16]


def recipe_for(apt_mirror: str) -> ImageRecipe:
    """The image for a mirror (as [mirrors] apt, empty for the usual one) and this machine's authorities."""
    own = sorted(Path("/usr/local/share/ca-certificates").glob("**/*.crt"))
    certificates = tuple(pem for path in own for pem in CERTIFICATE.findall(path.read_text()))
    return ImageRecipe(mirror=f"{apt_mirror.rstrip('/')}/debian" if apt_mirror else "", certificates=certificates)


def bootstrap_command(recipe: ImageRecipe, target: Path) -> list[str]:
    """The mmdebstrap command that fills `target`. Pure."""
    command = [
        "mmdebstrap",
        "--variant=apt",
        f"--include={','.join(recipe.packages)}",
        recipe.suite,
        str(target),
    ]
    if recipe.mirror:
        security = f"{recipe.mirror}-security"
        command += [
            f"deb {recipe.mirror} {recipe.suite} main",
            f"deb {recipe.mirror} {recipe.suite}-updates main",
            f"deb {security} {recipe.suite}-security main",
        ]
    return command


def ensure_image(recipe: ImageRecipe, report: Report) -> Path:
    """The folder of the unpacked image, built where it is not cached. Raises LocalCloudError."""

    def build(root: Path) -> None:
        report("making the base image (once; one to three minutes)")
        run(*bootstrap_command(recipe, root))
        _make_bare(root, recipe)

    images = cache_folder() / "images"
    images.mkdir(parents=True, exist_ok=True, mode=0o700)
    return made_once(images / recipe.key(), build)


def _make_bare(root: Path, recipe: ImageRecipe) -> None:
    """Take out what every machine has of its own, put in what stands for the cloud's kernel and network."""
    for own in [*(root / "etc/ssh").glob("ssh_host_*"), root / "etc/hostname"]:
        own.unlink(missing_ok=True)
    (root / "etc/machine-id").write_text("")
    tools = root / TOOLS
    tools.mkdir(parents=True)
    shutil.copy(FILES / "attach-disks", tools)
    shutil.copy(FILES / "attach-wheels", tools)
    shutil.copy(FILES / "localcloud.service", root / "etc/systemd/system")
    run("chroot", root, "systemctl", "enable", "systemd-networkd", "localcloud")
    # They would take the apt lock at a moment of their own choosing.
    run("chroot", root, "systemctl", "disable", "apt-daily.timer", "apt-daily-upgrade.timer")
    for number, pem in enumerate(recipe.certificates):
        (root / f"usr/local/share/ca-certificates/outside-{number}.crt").write_text(pem)
    if recipe.certificates:
        run("chroot", root, "update-ca-certificates")


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
