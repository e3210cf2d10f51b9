"""The local cloud's ECS API as a process of its own: starting and ending it, and who its machines are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from inventory.localcloud import host, network, prerequisites
from inventory.localcloud.commands import LocalCloudError, Report
from inventory.localcloud.image import ensure_image, recipe_for
from inventory.localcloud.places import Places
from inventory.settings import Settings

START_TIMEOUT_S = 30
END_TIMEOUT_S = 20
NO_AIOHTTP = "serving the ECS API needs aiohttp, which is not installed: pip install -e '.[local]'"
SERVER = "inventory.localcloud.ecs.server"


@dataclass(frozen=True)
class RentedHost:
    """A machine of the API and its host here."""

    name: str
    """Within its cluster: te2."""
    instance_id: str
    machine: str
    hostname: str
    address: str
    status: str
    """As the API has it."""
    is_cut: bool


def serve(settings: Settings, report: Report) -> str:
    """Start the API where it does not run; its endpoint, as 127.0.0.1:8123. Raises LocalCloudError."""
    places = Places.of(settings.name)
    if places.record.exists():
        raise LocalCloudError(
            f"the cloud {settings.name!r} has hosts of `fab local.up`; `fab local.down` first, or another name"
        )
    running = endpoint(places)
    if running:
        report("the ECS API is running already")
        return running
    prerequisites.require()
    if not find_spec("aiohttp"):
        raise LocalCloudError(NO_AIOHTTP)
    image = ensure_image(recipe_for(settings.mirrors.resolved().apt), report)
    places.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not places.base_image.is_symlink():
        places.base_image.symlink_to(image)
    process = _start(settings, places)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (told := endpoint(places)):
        if process.poll() is not None or time.monotonic() > deadline:
            words = _log(places).read_text(errors="replace").splitlines()[-5:]
            raise LocalCloudError("the ECS API does not start:" + "".join(f"\n  {line}" for line in words))
        time.sleep(0.1)
    return told


def _start(settings: Settings, places: Places) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", SERVER, f"--cloud={settings.name}", f"--subnet={settings.local.subnet}"]
    command += [f"--region={settings.aliyun.region}", f"--folder={places.folder}"]
    command += [f"--metadata={settings.local.metadata_address}"]
    checkout = Path(__file__).parents[2]
    with os.fdopen(os.open(_log(places), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
        return subprocess.Popen(
            command, cwd=checkout, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _log(places: Places) -> Path:
    return places.folder / "api.log"


def is_served(places: Places) -> bool:
    """Whether this cloud's machines are rented through the API, running at the moment or not."""
    return places.world.exists()


def endpoint(places: Places) -> str:
    """Where the API listens; empty while it does not run."""
    told = _address(places)
    return str(told["endpoint"]) if told and _is_ours(places, int(str(told["pid"]))) else ""


def _address(places: Places) -> dict[str, object] | None:
    try:
        told = json.loads((places.folder / "api.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def _is_ours(places: Places, pid: int) -> bool:
    """Whether the process is this cloud's server: ids are used again."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    return SERVER in words and f"--cloud={places.cloud}" in words


def end(places: Places) -> None:
    """End the API where it runs; its machines go on running. Raises LocalCloudError."""
    told = _address(places)
    pid = int(str(told["pid"])) if told else 0
    if not pid or not _is_ours(places, pid):
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_TIMEOUT_S
    while _is_ours(places, pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline + END_TIMEOUT_S:
            raise LocalCloudError(f"the ECS API (process {pid}) does not end")
        time.sleep(0.05)


def machines(places: Places) -> tuple[RentedHost, ...]:
    """The machines there are, by name."""
    from inventory.localcloud.ecs import world

    prefix = f"{places.cloud}-"
    found = [
        RentedHost(
            name=each.name.removeprefix(prefix),
            instance_id=each.instance_id,
            machine=each.machine,
            hostname=each.hostname,
            address=each.address,
            status=each.status,
            is_cut=network.is_cut(places.link(each.machine)),
        )
        for each in world.load(places.world).instances.values()
    ]
    return tuple(sorted(found, key=lambda each: (len(each.name), each.name)))


def find(places: Places, name: str) -> RentedHost:
    """By te2, by the whole name or by id. Raises LocalCloudError naming those there are."""
    found = machines(places)
    for each in found:
        if name in (each.name, f"{places.cloud}-{each.name}", each.instance_id):
            return each
    known = ", ".join(each.name for each in found) or "none"
    raise LocalCloudError(f"there is no machine {name!r}; there is: {known}")


def cut(places: Places, name: str) -> None:
    """Pull a machine's network cable; it goes on running."""
    network.set_link(places.link(find(places, name).machine), "down")


def heal(places: Places, name: str) -> None:
    """Plug the cable in again; returns when the machine answers."""
    found = find(places, name)
    network.set_link(places.link(found.machine), "up")
    host.wait_for_ssh(places, host.Host(found.machine, found.hostname, found.address))


def show_wheels(places: Places, wheels: Path) -> None:
    """Name a wheelhouse for the next boot of every machine."""
    places.wheels.write_text(f"{wheels.name}\n")
    for each in machines(places):
        if places.root(each.machine).exists():
            host.show_wheels(places, each.machine)
