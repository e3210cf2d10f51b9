"""Machines that only pretend to boot, so that the API and what is above it can be tested anywhere.

A stand-in for `inventory.localcloud.ecs.hosts.Hosts`. Disks and snapshots are
sparse files, so that copies of them are real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from inventory.localcloud import disk as blocks
from inventory.localcloud.ecs.account import EmulatedDisk, EmulatedInstance, EmulatedSnapshot

GIB = 1 << 30


@dataclass
class FakeMachines:
    """Pretended machines. What they keep lies below the folder."""

    folder: Path
    boot_s: float = 0
    """How long booting takes."""
    _keys: threading.Lock = field(default_factory=threading.Lock)

    def make_disk(self, disk: EmulatedDisk, source: EmulatedSnapshot | None) -> None:
        path = self.disk(disk.disk_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        if source:
            blocks.copy(self.snapshot(source.snapshot_id), path)
        else:
            path.touch()
        os.truncate(path, disk.size_gib * GIB)

    def remove_disk(self, disk: EmulatedDisk) -> None:
        self.disk(disk.disk_id).unlink(missing_ok=True)

    def boot(self, instance: EmulatedInstance, disks: list[EmulatedDisk], authorized_keys: str) -> None:
        time.sleep(self.boot_s)
        self._host_key(instance)

    def power_off(self, instance: EmulatedInstance) -> None:
        """Nothing runs."""

    def release(self, instance: EmulatedInstance) -> None:
        shutil.rmtree(self._home(instance), ignore_errors=True)

    def show_disks(self, instance: EmulatedInstance, disks: list[EmulatedDisk]) -> None:
        """Nothing looks."""

    def take_snapshot(self, disk: EmulatedDisk, snapshot: EmulatedSnapshot, machine: str) -> int:
        return blocks.copy(self.disk(disk.disk_id), self.snapshot(snapshot.snapshot_id))

    def remove_snapshot(self, snapshot: EmulatedSnapshot) -> None:
        self.snapshot(snapshot.snapshot_id).unlink(missing_ok=True)

    def run(self, instance: EmulatedInstance, script: str, timeout_s: float) -> tuple[int, bytes]:
        """Only a script that reads the host keys has output: the same one for the machine's whole life."""
        return 0, self._host_key(instance) if "ssh_host_" in script else b""

    def disk(self, disk_id: str) -> Path:
        """The file of a disk, for a test to write into."""
        return self.folder / "disks" / f"{disk_id}.img"

    def snapshot(self, snapshot_id: str) -> Path:
        return self.folder / "snapshots" / f"{snapshot_id}.img"

    def _home(self, instance: EmulatedInstance) -> Path:
        return self.folder / "machines" / instance.instance_id

    def _host_key(self, instance: EmulatedInstance) -> bytes:
        key = self._home(instance) / "ssh_host_ed25519_key"
        with self._keys:
            if not key.exists():
                key.parent.mkdir(parents=True, exist_ok=True)
                command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"root@{instance.hostname}", "-f"]
                subprocess.run([*command, str(key)], check=True, stdin=subprocess.DEVNULL)
        return key.with_suffix(".pub").read_bytes()
