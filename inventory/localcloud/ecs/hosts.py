"""The machines behind the API as real hosts: systemd-nspawn, loop disks, copies of disks; and the metadata service, at
one address on our own bridge and nowhere else."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

from aiohttp import web

from inventory.localcloud import disk, host, inside, network
from inventory.localcloud.commands import LocalCloudError, run
from inventory.localcloud.ecs import actions
from inventory.localcloud.ecs.account import EmulatedDisk, EmulatedInstance, EmulatedSnapshot
from inventory.localcloud.ecs.actions import EmulatedCloud
from inventory.localcloud.image import TOOLS
from inventory.localcloud.places import Places

PORT = 80
TOKEN_HEADER = "X-aliyun-ecs-metadata-token"
LONGEST_TOKEN_S = 21_600
OWN_FILES = ("instance-id", "hostname", "image-id", "zone-id", "vpc-id", "vswitch-id")


def metadata(cloud: EmulatedCloud, instance: EmulatedInstance) -> dict[str, str]:
    """The files below /latest/meta-data, by their paths there; folders have no listing."""
    notice = {"instance/spot/termination-time": actions.second(instance.reclaim_at)} if instance.noticed else {}
    return {
        **{name: getattr(instance, name.replace("-", "_")) for name in OWN_FILES},
        "region-id": cloud.account.region_id,
        "private-ipv4": instance.address,
        "instance/instance-type": instance.instance_type,
        "instance/instance-name": instance.name,
        **notice,
    }


@dataclass
class Service:
    """Answers machines by the address they ask from."""

    cloud: EmulatedCloud
    _tokens: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Token -> the instance it was given to, and when it ends."""
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_put("/latest/api/token", self._give_token)
        app.router.add_get("/latest/meta-data/{path:.*}", self._meta_data)
        return app

    def _asking(self, request: web.Request) -> EmulatedInstance:
        with self.cloud.lock:
            for instance in self.cloud.account.instances.values():
                if instance.address == request.remote:
                    return instance
        raise web.HTTPNotFound

    def _allowed(self, request: web.Request) -> EmulatedInstance:
        instance, token = self._asking(request), request.headers.get(TOKEN_HEADER)
        owner, ends = self._tokens.get(token or "", ("", 0.0))
        if token is not None and (owner != instance.instance_id or time.monotonic() > ends):
            raise web.HTTPUnauthorized
        return instance

    async def _give_token(self, request: web.Request) -> web.Response:
        instance = self._asking(request)
        lifetime = request.headers.get(f"{TOKEN_HEADER}-ttl-seconds", "")
        if not lifetime.isdecimal() or not 1 <= int(lifetime) <= LONGEST_TOKEN_S:
            raise web.HTTPBadRequest
        now = time.monotonic()
        self._tokens = {each: of for each, of in self._tokens.items() if of[1] > now}
        token = secrets.token_urlsafe(32)
        self._tokens[token] = (instance.instance_id, now + int(lifetime))
        return web.Response(text=token)

    async def _meta_data(self, request: web.Request) -> web.Response:
        instance = self._allowed(request)
        with self.cloud.lock:
            content = metadata(self.cloud, instance).get(request.match_info["path"])
        if content is None:
            raise web.HTTPNotFound
        return web.Response(text=content)

    def listen(self, sock: socket.socket) -> None:
        """Answer on a bound socket, in a thread of its own."""
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def serve() -> None:
            runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=0.5)
            await runner.setup()
            await web.SockSite(runner, sock).start()
            self._stop = asyncio.Event()
            ready.set()
            await self._stop.wait()
            await runner.cleanup()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),), daemon=True)
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """Close the socket."""
        if self._loop and self._thread:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=5)


def start(cloud: EmulatedCloud, address: str, bridge: str) -> Service:
    """Put the address on the bridge and answer there, to what comes in by this bridge only.

    Several clouds have the same address, each on its own bridge. Raises LocalCloudError.
    """
    run("ip", "address", "replace", f"{address}/32", "dev", bridge)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, bridge.encode())
        sock.bind((address, PORT))
        sock.listen()
    except OSError as error:
        sock.close()
        taken = f"the metadata service cannot listen at {address}:{PORT} on {bridge}: {error.strerror}"
        raise LocalCloudError(f"{taken}; local.metadata_address in cluster.toml names another address") from error
    sock.setblocking(False)
    service = Service(cloud)
    service.listen(sock)
    return service


# The machines behind the API as real hosts: systemd-nspawn, loop disks, copies of disks.

FINISH_BOOT_S = 300
"""After that the machine counts as running all the same."""
log = logging.getLogger(__name__)


@dataclass
class Hosts:
    """Real machines of one cloud on one bridge."""

    places: Places
    subnet: IPv4Network
    metadata_address: str
    _metadata: Service = field(init=False, repr=False)

    def begin(self, cloud: EmulatedCloud) -> None:
        """Before the first call: bridge and metadata; what should run and does not is shown as stopped."""
        network.ensure_network(self.places, self.subnet)
        self._metadata = start(cloud, self.metadata_address, self.places.bridge)
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
            disk.detach(self.places.disk_image(f"d-{serial}"))
        host.discard(self.places, name)

    def show_disks(self, instance: EmulatedInstance, disks: list[EmulatedDisk]) -> None:
        host.list_disks(self.places, instance.machine, self._images(disks))
        inside.call(self.places, instance.machine, f"/{TOOLS}/attach-disks", timeout_s=30)

    def _rows(self, name: str) -> list[tuple[str, str, str]]:
        return disk.rows(host.attached_disks(self.places, name))

    def take_snapshot(self, disk_: EmulatedDisk, snapshot: EmulatedSnapshot, machine: str) -> int:
        target = self.places.snapshot_image(snapshot.snapshot_id)
        image = self.places.disk_image(disk_.disk_id)
        loop = disk.device_of(image) or ""
        return disk.copy(image, target, loop, self._mounted(disk_, loop))

    def _mounted(self, disk_: EmulatedDisk, loop: str) -> list[Path]:
        """Where the file systems of a disk are mounted in the machine it is attached to, reached from here."""
        for folder in (self.places.folder / "hosts").glob("*"):
            is_its = any(serial == disk_.serial for _, _, serial in self._rows(folder.name))
            leader = inside.leader(self.places, folder.name)
            if loop and is_its and leader is not None:
                points = inside.mounts_from(leader, loop)
                return [Path(f"/proc/{leader}/root") / point.relative_to("/") for point in points]
        return []

    def remove_snapshot(self, snapshot: EmulatedSnapshot) -> None:
        self.places.snapshot_image(snapshot.snapshot_id).unlink(missing_ok=True)

    def run(self, instance: EmulatedInstance, script: str, timeout_s: float) -> tuple[int, bytes]:
        return inside.run_script(self.places, instance.machine, script, timeout_s)
