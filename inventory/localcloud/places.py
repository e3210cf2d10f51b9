"""Where the local cloud keeps things, and what its parts are called on this machine.

Every name derives from the cluster's, so that `down` finds what is ours without any record of it.
"""

from __future__ import annotations

import configparser
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inventory import local_address
from inventory.local_address import ADDRESS, CREDENTIALS

CACHED = ("images", "wheelhouse")
"""The folders of the cache that are the local cloud's."""
PREFIX = "spt"
"""Of a bridge's name, before its cloud's."""


def cache_folder() -> Path:
    """What can be made again: images and wheels."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "spotune"


def cache_size_bytes() -> int:
    """What lies there of them, links not followed."""
    files = [each for made in CACHED for each in (cache_folder() / made).rglob("*") if not each.is_symlink()]
    return sum(each.stat().st_size for each in files if each.is_file())


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time fills a cache folder, begins or ends a cloud."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Places:
    """Paths and names of one cloud. Hosts: m1, m2, ..."""

    cloud: str
    folder: Path

    @classmethod
    def of(cls, cloud: str) -> Places:
        """The places of the cloud with this name, for the current user."""
        return cls(cloud, local_address.clouds() / cloud)

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f"{self.cloud}.lock")

    @property
    def wheels(self) -> Path:
        """Names the wheelhouse this cloud's hosts are shown."""
        return self.folder / "wheels"

    def host(self, name: str) -> Path:
        return self.folder / "hosts" / name

    def root(self, name: str) -> Path:
        """A host's root file system, as mounted here."""
        return self.host(name) / "root"

    def disk_image(self, disk_id: str) -> Path:
        """Of a data disk, whatever machine it is attached to."""
        return self.folder / "disks" / f"{disk_id}.img"

    def snapshot_image(self, snapshot_id: str) -> Path:
        return self.folder / "snapshots" / f"{snapshot_id}.img"

    @property
    def world(self) -> Path:
        """What the ECS API knows."""
        return self.folder / "world.json"

    @property
    def base_image(self) -> Path:
        """Link to the image that machines boot from, made before the first boot."""
        return self.folder / "image"

    def console(self, name: str) -> Path:
        return self.host(name) / "console.log"

    @property
    def bridge(self) -> str:
        return f"{PREFIX}-{self.cloud}"

    @property
    def table(self) -> str:
        return f"spotune_{self.cloud}"

    @property
    def group_prefix(self) -> str:
        return f"spotune-{self.cloud}-"

    def group(self, name: str) -> str:
        return self.group_prefix + name

    def machine(self, name: str) -> str:
        # An interface name has 15 bytes: "vb-" + eight of the cloud + "m999" fills them.
        return self.cloud + name

    def link(self, name: str) -> str:
        """The host's cable: its end on our bridge, as systemd-nspawn names it."""
        return f"vb-{self.machine(name)}"


CONTROL = "control.sock"


def key_of(folder: Path) -> tuple[str, str]:
    """Access key id and secret of the cloud in this folder, made on the first call.

    The file is in the form of the vendor's SDK: its ProfileCredentialsProvider reads it.
    """
    path = folder / CREDENTIALS
    ini = configparser.ConfigParser(interpolation=None)
    if not ini.read(path, encoding="utf-8"):
        key_id, secret = f"LOCAL{secrets.token_hex(8)}", secrets.token_hex(15)
        ini["default"] = {"type": "access_key", "access_key_id": key_id, "access_key_secret": secret}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            ini.write(file)
    profile = ini["default"]
    return profile["access_key_id"], profile["access_key_secret"]


@contextmanager
def control_socket(folder: Path) -> Iterator[str]:
    """The control socket's path, by a name that is short however deep the folder lies: the system takes 107 bytes."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/{CONTROL}"
    finally:
        os.close(descriptor)


def tell(folder: Path, port: int) -> None:
    """Write where the API listens and which process it is."""
    half = folder / f"{ADDRESS}.half"
    half.write_text(json.dumps({"endpoint": f"127.0.0.1:{port}", "pid": os.getpid()}), encoding="utf-8")
    half.replace(folder / ADDRESS)
