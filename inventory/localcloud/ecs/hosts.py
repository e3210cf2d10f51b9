"""The machines behind the API as real hosts: systemd-nspawn, loop disks, copies of disks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

from inventory.localcloud import blocks, disk, host, inside, network, prerequisites
from inventory.localcloud.commands import LocalCloudError, run
from inventory.localcloud.ecs import metadata
from inventory.localcloud.ecs.calls import Cloud
from inventory.localcloud.ecs.world import Disk, Instance, Snapshot
from inventory.localcloud.image import TOOLS, ensure_image, recipe_for
from inventory.localcloud.mounts import remove_tree
from inventory.localcloud.places import Places

FINISH_BOOT_S = 300
"""User data may take its time; after that the machine counts as running all the same."""
MOST_CONSOLE = 64 * 1024
log = logging.getLogger(__name__)


@dataclass
class Hosts:
    """Real machines of one cloud on one bridge."""

    places: Places
    subnet: IPv4Network
    metadata_address: str = ""
    _metadata: metadata.Service | None = field(default=None, repr=False)

    @classmethod
    def of(cls, cloud: str, subnet: str, metadata_address: str = "") -> Hosts:
        """The hosts of the cloud with this name, for the current user."""
        return cls(Places.of(cloud), IPv4Network(subnet), metadata_address)

    def begin(self, cloud: Cloud) -> None:
        """Before the first call: bridge and metadata; what should run and does not is shown as stopped."""
        prerequisites.require()
        network.ensure_network(self.places, self.subnet)
        if self.metadata_address:
            self._metadata = metadata.start(cloud, self.metadata_address, self.places.bridge)
        with cloud.lock:
            for instance in cloud.world.instances.values():
                if instance.status == "Running" and not host.is_running(self.places, instance.machine):
                    log.warning("%s (%s) is not running any more", instance.instance_id, instance.name)
                    instance.status = "Stopped"
            cloud.save()

    def end(self) -> None:
        """After the last call. Hosts go on running."""
        if self._metadata:
            self._metadata.stop()

    def make_disk(self, disk_: Disk, source: Snapshot | None) -> None:
        if disk_.kind == "system":
            return  # made at boot, of the image
        image = self.places.disk_image(disk_.disk_id)
        image.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        image.unlink(missing_ok=True)
        if source is None:
            disk.make_disk(image, disk_.size_gib)
        else:
            blocks.copy(self.places.snapshot_image(source.snapshot_id), image)
            disk.grow(image, disk_.size_gib)

    def grow_disk(self, disk_: Disk) -> None:
        image = self.places.disk_image(disk_.disk_id)
        if image.exists():
            disk.grow(image, disk_.size_gib)

    def remove_disk(self, disk_: Disk) -> None:
        image = self.places.disk_image(disk_.disk_id)
        if image.exists():
            disk.detach(image)
            image.unlink()

    def boot(self, instance: Instance, disks: list[Disk], authorized_keys: str) -> None:
        machine = self._machine(instance, disks, authorized_keys)
        if not host.is_running(self.places, machine.name):
            network.ensure_network(self.places, self.subnet)
            began_as = instance.image_snapshot_id
            layers = self.places.snapshot_layers(began_as) if began_as else None
            host.prepare(self.places, machine, self._image(), self.subnet, layers)
            if self.metadata_address:
                tools = self.places.root(machine.name) / TOOLS
                (tools / "metadata").write_text(f"{self.metadata_address}\n")
            host.start(self.places, machine)
        host.wait_for_ssh(self.places, machine)
        try:
            waiting = "case $(systemctl is-system-running --wait) in running|degraded) ;; *) exit 1 ;; esac"
            inside.call(self.places, machine.name, "sh", "-c", waiting, timeout_s=FINISH_BOOT_S)
        except LocalCloudError as error:
            log.warning("%s: %s", instance.instance_id, error)

    def _machine(self, instance: Instance, disks: list[Disk], authorized_keys: str) -> host.Host:
        attached = tuple(host.AttachedDisk(self.places.disk_image(each.disk_id), each.serial) for each in disks)
        keys = f"{authorized_keys.strip()}\n" if authorized_keys.strip() else ""
        return host.Host(instance.machine, instance.hostname, instance.address, attached, keys)

    def _image(self) -> Path:
        """What `fab local.serve` chose, so that a served cloud does not build one in the middle of a call."""
        link = self.places.base_image
        return link.readlink() if link.is_symlink() else ensure_image(recipe_for(""), log.info)

    def power_off(self, instance: Instance) -> None:
        host.stop(self.places, instance.machine)

    def release(self, instance: Instance) -> None:
        name = instance.machine
        host.stop(self.places, name)
        for _, loop, _ in self._rows(name):
            self._detach(loop)
        if self.places.host(name).exists():
            host.discard(self.places, name, keep_disk=True)
            remove_tree(self.places.host(name))

    def show_disks(self, instance: Instance, disks: list[Disk]) -> None:
        name, table = instance.machine, self._table(instance.machine)
        wanted = {each.serial for each in disks}
        gone = [(loop, serial) for _, loop, serial in self._rows(name) if serial not in wanted]
        for loop, _ in gone:
            for mounted in inside.mounts_from(self.places, name, loop):
                inside.call(self.places, name, "umount", str(mounted), timeout_s=60)
        attached = [(disk.attach(self.places.disk_image(each.disk_id)), each.serial) for each in disks]
        table.write_text(disk.renewed_table(table.read_text(), attached))
        inside.call(self.places, name, f"/{TOOLS}/attach-disks", timeout_s=30)
        for loop, _ in gone:
            self._detach(loop)

    def _table(self, name: str) -> Path:
        return self.places.root(name) / TOOLS / "disks"

    def _rows(self, name: str) -> list[tuple[str, str, str]]:
        table = self._table(name)
        return disk.rows(table.read_text()) if table.exists() else []

    def _detach(self, loop: str) -> None:
        backing = Path(f"/sys/block/{loop}/loop/backing_file")
        # Another cloud's, if ours was detached and the device given away since.
        if backing.exists() and Path(backing.read_text().strip()).parent == (self.places.folder / "disks").resolve():
            run("losetup", "--detach", f"/dev/{loop}")

    def take_snapshot(self, disk_: Disk, snapshot: Snapshot, machine: str) -> int:
        if disk_.kind == "system":
            return host.copy_root(self.places, machine, self.places.snapshot_layers(snapshot.snapshot_id))
        target = self.places.snapshot_image(snapshot.snapshot_id)
        image = self.places.disk_image(disk_.disk_id)
        loop = disk.device_of(image) or ""
        return blocks.copy(image, target, loop, self._mounted(disk_, loop))

    def _mounted(self, disk_: Disk, loop: str) -> list[Path]:
        """Where the file systems of a disk are mounted in the machine it is attached to, reached from here."""
        for folder in (self.places.folder / "hosts").glob("*"):
            is_its = any(serial == disk_.serial for _, _, serial in self._rows(folder.name))
            if loop and is_its and host.is_running(self.places, folder.name):
                pid = inside.leader(self.places, folder.name)
                points = inside.mounts_from(self.places, folder.name, loop)
                return [Path(f"/proc/{pid}/root") / point.relative_to("/") for point in points]
        return []

    def remove_snapshot(self, snapshot: Snapshot) -> None:
        self.places.snapshot_image(snapshot.snapshot_id).unlink(missing_ok=True)
        remove_tree(self.places.snapshot_layers(snapshot.snapshot_id))

    def run(self, instance: Instance, script: str, timeout_s: float) -> tuple[int, bytes]:
        return inside.run_script(self.places, instance.machine, script, timeout_s)

    def console(self, instance: Instance) -> str:
        console = self.places.console(instance.machine)
        return console.read_text(errors="replace")[-MOST_CONSOLE:] if console.exists() else ""
