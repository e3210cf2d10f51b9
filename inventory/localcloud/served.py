"""The cloud on this machine: its ECS API as a process of its own, who its machines are, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from inventory.local_address import address
from inventory.localcloud import disk, host, inside, network, prerequisites, shape
from inventory.localcloud.commands import LocalCloudError, Report, remove_tree, unmount_below
from inventory.localcloud.ecs import account
from inventory.localcloud.ecs.account import EmulatedInstance
from inventory.localcloud.image import TOOLS, ensure_image, recipe_for
from inventory.localcloud.places import Places, alone
from inventory.settings import Settings

START_TIMEOUT_S = 30
END_TIMEOUT_S = 20
NO_AIOHTTP = "serving the ECS API needs aiohttp, which is not installed: pip install -e '.[local]'"
SERVER = "inventory.localcloud.ecs.server"


def serve(settings: Settings, report: Report) -> str:
    """Start the API where it does not run; its endpoint, as 127.0.0.1:8123. Raises LocalCloudError."""
    places = Places.of(settings.name)
    if running := endpoint(places):
        report("the ECS API is running already")
        return running
    prerequisites.require()
    if not find_spec("aiohttp"):
        raise LocalCloudError(NO_AIOHTTP)
    with alone(places.lock):
        return endpoint(places) or _started(settings, places, report)


def _started(settings: Settings, places: Places, report: Report) -> str:
    image = ensure_image(recipe_for(settings.mirrors.resolved().apt), report)
    places.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not places.base_image.is_symlink():
        places.base_image.symlink_to(image)
    before = len(_log(places).read_bytes()) if _log(places).exists() else 0
    process = _start(settings, places)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (started := endpoint(places)):
        if process.poll() is not None or time.monotonic() > deadline:
            words = _log(places).read_bytes()[before:].decode(errors="replace").splitlines()[-5:]
            raise LocalCloudError("\n  ".join(("the ECS API does not start:", *words)))
        time.sleep(0.1)
    return started


def _start(settings: Settings, places: Places) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", SERVER, f"--cloud={settings.name}", f"--subnet={settings.local.subnet}"]
    command += [f"--region={settings.aliyun.region}", f"--metadata={settings.local.metadata_address}"]
    checkout = Path(__file__).parents[2]
    with os.fdopen(os.open(_log(places), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
        return subprocess.Popen(
            command, cwd=checkout, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _log(places: Places) -> Path:
    return places.folder / "api.log"


def endpoint(places: Places) -> str:
    """Where the API listens; empty while it does not run."""
    last = address(places.cloud)
    return last.endpoint if last and _is_ours(places, last.pid) else ""


def running(places: Places) -> str:
    """As `endpoint`. Raises LocalCloudError where the API does not run."""
    if not (where := endpoint(places)):
        raise LocalCloudError(f"the ECS API of the cloud {places.cloud!r} does not run; start it: fab local.serve")
    return where


def _is_ours(places: Places, pid: int) -> bool:
    """Whether the process is this cloud's server: ids are used again."""
    words = _command_line(pid).split("\0")
    return SERVER in words and f"--cloud={places.cloud}" in words


def _command_line(pid: int) -> str:
    """Its words, each ended by a NUL; empty where no such process runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def end(places: Places) -> None:
    """End the API where it runs; its machines go on running. Raises LocalCloudError."""
    last = address(places.cloud)
    pid = last.pid if last else 0
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


def _end_what_it_ran(places: Places) -> None:
    """End the programs of a server that was killed, which outlive it in its session. Raises LocalCloudError."""
    last = address(places.cloud)
    session = last.pid if last else 0
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := [pid for pid in _in_session(session) if str(places.folder) in _command_line(pid)]:
        if time.monotonic() > deadline:
            raise LocalCloudError(f"what the ECS API was running (process {left[0]}) does not end")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _in_session(session: int) -> list[int]:
    """The processes of a session that still run."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                pids.append(int(path.parent.name))
    return pids


def down(places: Places) -> None:
    """End the API and remove everything of this cloud.

    It is found by name and by folder, so that a crash half-way or a damaged record is no obstacle.
    """
    with alone(places.lock):
        end(places)
        _end_what_it_ran(places)
        for group in inside.groups_named(places.group_prefix):
            host.stop(places, group.removeprefix(places.group_prefix))
        unmount_below(places.folder)
        disk.detach_below(places.folder)
        network.remove_network(places)
        remove_tree(places.folder)


def what_is_there(places: Places) -> str:
    """What `down` takes, in words; empty where there is nothing of a user's, or no cloud."""
    try:
        record = account.load(places.world)
    except LocalCloudError:
        return "what its damaged record does not tell"
    kept_disks = sum(not each.instance_id for each in record.disks.values())
    counted = {"machine": len(record.instances), "kept disk": kept_disks, "snapshot": len(record.snapshots)}
    return ", ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counted.items() if count)


def machines(places: Places) -> tuple[EmulatedInstance, ...]:
    """The machines there are, te2 before te10. Raises LocalCloudError."""
    instances = account.load(places.world).instances.values()
    return tuple(sorted(instances, key=lambda each: (len(each.name), each.name)))


def short_name(places: Places, instance: EmulatedInstance) -> str:
    """Within its cluster: te2."""
    return instance.name.removeprefix(f"{places.cloud}-")


def find(places: Places, name: str) -> EmulatedInstance:
    """By te2, by the whole name or by id. Raises LocalCloudError naming those there are."""
    instances = machines(places)
    for each in instances:
        if name in (short_name(places, each), each.name, each.instance_id):
            return each
    known = ", ".join(short_name(places, each) for each in instances) or "none"
    raise LocalCloudError(f"there is no machine {name!r}; there is: {known}")


def cut(places: Places, name: str) -> None:
    """Pull a machine's network cable; it goes on running."""
    network.set_link(places.link(find(places, name).machine), "down")


def heal(places: Places, name: str) -> None:
    """Plug the cable in again; returns when the machine answers."""
    instance = find(places, name)
    network.set_link(places.link(instance.machine), "up")
    host.wait_for_ssh(places, instance.machine, instance.address)


def reshape(places: Places, names: Sequence[str], wanted: shape.Shape) -> tuple[EmulatedInstance, ...]:
    """Ask a shape of machines, without names of all and of those to come, and put it into force on those that run;
    the machines it was asked of. Raises LocalCloudError before anything changes where one is unknown."""
    if not places.folder.exists():
        raise LocalCloudError(f"there is no cloud {places.cloud!r} on this machine; start it: fab local.serve")
    instances = tuple(find(places, name) for name in names) if names else machines(places)
    if names:
        for each in instances:
            shape.ask_one(places, each.machine, wanted)
    else:
        shape.ask_all(places, wanted)
    for each in instances:
        shape.apply(places, each.machine)
    return instances


def show_wheels(places: Places, wheels: Path) -> None:
    """Show a wheelhouse (see `ensure_wheelhouse`) to every machine, at /opt/spotune/wheelhouse."""
    places.wheels.write_text(f"{wheels.name}\n")
    for each in machines(places):
        if places.root(each.machine).exists():
            host.show_wheels(places, each.machine)
        if host.is_running(places, each.machine):
            inside.call(places, each.machine, f"/{TOOLS}/attach-wheels", timeout_s=30)
