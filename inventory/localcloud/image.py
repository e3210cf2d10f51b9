"""The base image: a bare Debian 12 as a cloud would boot it, made once and cached by what it holds."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from inventory.localcloud.commands import Report, run
from inventory.localcloud.mounts import made_once
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
