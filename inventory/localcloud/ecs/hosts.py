"""The machines behind the API as real hosts: systemd-nspawn, loop disks, copies of disks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

from inventory.localcloud import disk, host, inside, network
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs import metadata
from inventory.localcloud.ecs.account import EmulatedDisk, EmulatedInstance, EmulatedSnapshot
from inventory.localcloud.ecs.actions import EmulatedCloud
from inventory.localcloud.image import TOOLS
from inventory.localcloud.places import Places

FINISH_BOOT_S = 300
"""After that the machine counts as running all the same."""
log = logging.getLogger(__name__)


@dataclass
class Hosts:
    """Real machines of one cloud on one bridge."""

    places: Places
    subnet: IPv4Network
    metadata_address: str
    _metadata: metadata.Service = field(init=False, repr=False)

    def begin(self, cloud: EmulatedCloud) -> None:
        """Before the first call: bridge and metadata; what should run and does not is shown as stopped."""
        network.ensure_network(self.places, self.subnet)
        self._metadata = metadata.start(cloud, self.metadata_address, self.places.bridge)
        with cloud.lock:
            for instance in cloud.account.instances.values():
                if instance.status == "Running" and not host.is_running(self.places, instance.machine):
                    log.warning("%s (%s) is not running any more", instance.instance_id, instance.name)
                    instance.status = "Stopped"
            cloud.save()

    def end(self) -> None:
        """After the last call. Hosts go on running."""
        self._metadata.stop()

    def make_disk(self, disk_: EmulatedDisk, source: EmulatedSnapshot | None) -> None:
        if disk_.kind == "system":
            return  # made at boot, of the image
        image = self.places.disk_image(disk_.disk_id)
        image.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        image.unlink(missing_ok=True)
        if source is None:
            disk.make_disk(image, disk_.size_gib)
        else:
            disk.copy(self.places.snapshot_image(source.snapshot_id), image)
            disk.grow(image, disk_.size_gib)

    def remove_disk(self, disk_: EmulatedDisk) -> None:
        image = self.places.disk_image(disk_.disk_id)
        if image.exists():
            disk.detach(image)
            image.unlink()

    def boot(self, instance: EmulatedInstance, disks: list[EmulatedDisk], authorized_keys: str) -> None:
        name, address = instance.machine, instance.address
        if not host.is_running(self.places, name):
            network.ensure_network(self.places, self.subnet)
            keys = f"{authorized_keys.strip()}\n" if authorized_keys.strip() else ""
            machine = host.LocalHost(name, instance.hostname, address, self._images(disks), keys)
            host.prepare(self.places, machine, self.subnet)
            host.start(self.places, machine)
        host.wait_for_ssh(self.places, name, address)
        try:
            waiting = "case $(systemctl is-system-running --wait) in running|degraded) ;; *) exit 1 ;; esac"
            inside.call(self.places, name, "sh", "-c", waiting, timeout_s=FINISH_BOOT_S)
        except LocalCloudError as error:
            log.warning("%s: %s", instance.instance_id, error)

    def _images(self, disks: list[EmulatedDisk]) -> dict[str, Path]:
        return {each.serial: self.places.disk_image(each.disk_id) for each in disks}

    def power_off(self, instance: EmulatedInstance) -> None:
        host.stop(self.places, instance.machine)

    def release(self, instance: EmulatedInstance) -> None:
        name = instance.machine
        host.stop(self.places, name)
        for _, _, serial in self._rows(name):
            disk.detach(self._image_of(serial))
        host.discard(self.places, name)

    def show_disks(self, instance: EmulatedInstance, disks: list[EmulatedDisk]) -> None:
        name, wanted = instance.machine, self._images(disks)
        gone = [(loop, serial) for _, loop, serial in self._rows(name) if serial not in wanted]
        for loop, _ in gone:
            for mounted in inside.mounts_from(self.places, name, loop):
                inside.call(self.places, name, "umount", str(mounted), timeout_s=60)
        host.list_disks(self.places, name, wanted)
        inside.call(self.places, name, f"/{TOOLS}/attach-disks", timeout_s=30)
        for _, serial in gone:
            disk.detach(self._image_of(serial))

    def _rows(self, name: str) -> list[tuple[str, str, str]]:
        return disk.rows(host.attached_disks(self.places, name))

    def _image_of(self, serial: str) -> Path:
        return self.places.disk_image(f"d-{serial}")

    def take_snapshot(self, disk_: EmulatedDisk, snapshot: EmulatedSnapshot, machine: str) -> int:
        if disk_.kind == "system":
            return 0  # nothing can be made from it here
        target = self.places.snapshot_image(snapshot.snapshot_id)
        image = self.places.disk_image(disk_.disk_id)
        loop = disk.device_of(image) or ""
        return disk.copy(image, target, loop, self._mounted(disk_, loop))

    def _mounted(self, disk_: EmulatedDisk, loop: str) -> list[Path]:
        """Where the file systems of a disk are mounted in the machine it is attached to, reached from here."""
        for folder in (self.places.folder / "hosts").glob("*"):
            is_its = any(serial == disk_.serial for _, _, serial in self._rows(folder.name))
            if loop and is_its and host.is_running(self.places, folder.name):
                pid = inside.leader(self.places, folder.name)
                points = inside.mounts_from(self.places, folder.name, loop)
                return [Path(f"/proc/{pid}/root") / point.relative_to("/") for point in points]
        return []

    def remove_snapshot(self, snapshot: EmulatedSnapshot) -> None:
        self.places.snapshot_image(snapshot.snapshot_id).unlink(missing_ok=True)

    def run(self, instance: EmulatedInstance, script: str, timeout_s: float) -> tuple[int, bytes]:
        return inside.run_script(self.places, instance.machine, script, timeout_s)
