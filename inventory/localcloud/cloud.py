"""The local cloud's commands: up, down, status, and what can happen to a machine."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Literal

from inventory.localcloud import cgroups, disk, host, network, prerequisites, served, state
from inventory.localcloud.commands import LocalCloudError, Report, run
from inventory.localcloud.image import TOOLS, ensure_image, recipe_for
from inventory.localcloud.mounts import remove_tree, unmount_below
from inventory.localcloud.places import Places
from inventory.localcloud.state import Host, Record
from inventory.nodes import Node
from inventory.settings import Settings, SettingsError

FINISH_BOOT = "case $(systemctl is-system-running --wait) in running|degraded) ;; *) exit 1;; esac"
"""Returns when the host has nothing left to start: a failed service of the user's is no failed boot."""


@dataclass(frozen=True)
class HostStatus:
    """A host as it is now."""

    host: Host
    state: Literal["running", "off", "cut"]
    disk_used_gib: float


def up(settings: Settings, nodes: int, report: Report) -> tuple[Node, ...]:
    """Boot what is not running and add hosts up to `nodes`; returns when ssh answers on all of them."""
    prerequisites.require()
    places = Places.of(settings.name)
    with _alone(places):
        if served.is_served(places):
            raise LocalCloudError(
                f"the machines of the cloud {settings.name!r} are rented (`fab local.serve`); "
                "`fab local.down` first, or another name"
            )
        record = state.load(places.record) or Record()
        if len(record.hosts) > nodes:
            report(f"{len(record.hosts)} hosts are there already; `fab local.down` first for fewer")
        record = state.grown(record, nodes, _subnet(settings))
        off = [h for h in record.hosts if not host.is_running(places, h.name)]
        if off:
            _boot(settings, places, record, off, report)
        else:
            report(f"all {len(record.hosts)} hosts are running already")
    return local_nodes(settings)


def _boot(settings: Settings, places: Places, record: Record, off: list[Host], report: Report) -> None:
    image = ensure_image(recipe_for(settings.mirrors.resolved().apt), report)
    places.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state.save(places.record, record)
    network.ensure_network(places, _subnet(settings))
    if not places.operator_key.exists():
        comment = f"spotune-{settings.name}"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", places.operator_key)
    _on_each(off, lambda h: _prepare(settings, places, h, image))
    _write_known_hosts(places, record)
    report(f"booting {', '.join(h.name for h in off)}")
    for each in off:
        host.start(places, _machine(places, each))
    nodes = {node.name: node for node in local_nodes(settings)}

    def wait(booting: Host) -> None:
        host.wait_for_ssh(places, _machine(places, booting))
        _on_host(nodes[booting.name], FINISH_BOOT)
        report(f"{booting.name}  {booting.address}  {booting.hostname}")

    _on_each(off, wait)


def _prepare(settings: Settings, places: Places, of: Host, image: Path) -> None:
    places.host(of.name).mkdir(parents=True, exist_ok=True)
    if not places.disk(of.name).exists():
        disk.make_disk(places.disk(of.name), settings.local.disk_gib)
    host.prepare(places, _machine(places, of), image, _subnet(settings))


def _machine(places: Places, of: Host) -> host.Host:
    return host.Host(
        name=of.name,
        hostname=of.hostname,
        address=of.address,
        disks=(host.AttachedDisk(places.disk(of.name), of.disk_serial),),
        authorized_keys=places.operator_key.with_suffix(".pub").read_text(),
    )


def _on_host(node: Node, command: str) -> None:
    from inventory import ssh

    try:
        with ssh.connect(node) as connection:
            ssh.run(connection, command)
    except ssh.SshError as error:
        raise LocalCloudError(str(error)) from error


def offer_wheels(settings: Settings, wheels: Path) -> None:
    """Show a wheelhouse (see `ensure_wheelhouse`) to every host, at /opt/spotune/wheelhouse."""
    places = Places.of(settings.name)
    with _alone(places):
        record = _record(places)
        places.wheels.write_text(f"{wheels.name}\n")
        for each in record.hosts:
            host.show_wheels(places, each.name)
        nodes = {node.name: node for node in local_nodes(settings)}
        running = [h for h in record.hosts if host.is_running(places, h.name)]
        _on_each(running, lambda h: _on_host(nodes[h.name], f"/{TOOLS}/attach-wheels"))


def _on_each(hosts: list[Host], work: Callable[[Host], None]) -> None:
    """Do something for all hosts at once; one error tells of all that failed."""

    def failure(each: Host) -> str | None:
        try:
            work(each)
        except (LocalCloudError, OSError) as error:
            return str(error) if str(error).startswith(each.name) else f"{each.name}: {error}"
        return None

    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        failures = [text for text in pool.map(failure, hosts) if text]
    if failures:
        raise LocalCloudError("\n".join([*failures, "`fab local.down` removes what was made"]))


def _write_known_hosts(places: Places, record: Record) -> None:
    keys = [(h.address, host.public_keys(places, h.name)) for h in record.hosts]
    places.known_hosts.write_text(state.known_hosts_text(keys))


def down(settings: Settings) -> None:
    """Remove everything of this cloud.

    It is found by name and by folder, so that a crash half-way or a lost record is no obstacle.
    """
    places = Places.of(settings.name)
    with _alone(places):
        served.end(places)
        for group in cgroups.groups_named(places.group_prefix):
            host.stop(places, group.removeprefix(places.group_prefix))
        unmount_below(places.folder)
        disk.detach_below(places.folder)
        network.remove_network(places)
        remove_tree(places.folder)


def status(settings: Settings) -> tuple[HostStatus, ...]:
    """Every host and whether it runs; empty where there is no cloud."""
    places = Places.of(settings.name)
    record = state.load(places.record) or Record()
    return tuple(HostStatus(h, _state_of(places, h), _used_gib(places.disk(h.name))) for h in record.hosts)


def _state_of(places: Places, of: Host) -> Literal["running", "off", "cut"]:
    if not host.is_running(places, of.name):
        return "off"
    return "cut" if network.is_cut(places.link(of.name)) else "running"


def _used_gib(image: Path) -> float:
    return image.stat().st_blocks * 512 / 2**30 if image.exists() else 0.0


def local_nodes(settings: Settings) -> tuple[Node, ...]:
    """The hosts as nodes, in rank order. Raises SettingsError where there are none."""
    places = Places.of(settings.name)
    try:
        record = state.load(places.record)
    except LocalCloudError as error:
        raise SettingsError(str(error)) from error
    if record is None:
        raise SettingsError(f"the local cloud {settings.name!r} has no hosts; boot them: fab local.up")
    return tuple(
        Node(
            name=h.name,
            rank=h.rank,
            address=h.address,
            private_address=h.address,
            user="root",
            port=22,
            key=places.operator_key,
            known_hosts=places.known_hosts,
            gpus=0,
            disk_serial=h.disk_serial,
        )
        for h in record.hosts
    )


def cut(settings: Settings, name: str) -> None:
    """Pull a host's network cable; the host goes on running."""
    places, found = _find(settings, name)
    network.set_link(places.link(found.name), "down")


def heal(settings: Settings, name: str) -> None:
    """Plug the cable in again; returns when the host answers: the first moments of a link still say "no route"."""
    places, found = _find(settings, name)
    network.set_link(places.link(found.name), "up")
    host.wait_for_ssh(places, _machine(places, found))


def power_off(settings: Settings, name: str) -> None:
    """Take a host's power away; root file system and disk stay as they were at that moment."""
    places, found = _find(settings, name)
    host.stop(places, found.name)


def power_on(settings: Settings, name: str, report: Report) -> None:
    """Boot a host that is off; returns when ssh answers."""
    places, found = _find(settings, name)
    with _alone(places):
        if not host.is_running(places, name):
            _boot(settings, places, _record(places), [found], report)


def recreate(settings: Settings, name: str, report: Report, *, fresh_disk: bool = False) -> Node:
    """Replace a host by a new machine: same name and rank; new address, host keys and root file system."""
    places, found = _find(settings, name)
    with _alone(places):
        host.stop(places, found.name)
        host.discard(places, found.name, keep_disk=not fresh_disk)
        record = state.renewed(_record(places), name, _subnet(settings), fresh_disk)
        _boot(settings, places, record, [record.host(name)], report)
    return next(node for node in local_nodes(settings) if node.name == name)


def _find(settings: Settings, name: str) -> tuple[Places, Host]:
    places = Places.of(settings.name)
    return places, _record(places).host(name)


def _record(places: Places) -> Record:
    record = state.load(places.record)
    if record is None:
        raise LocalCloudError(f"the local cloud {places.cloud!r} has no hosts; boot them: fab local.up")
    return record


def _subnet(settings: Settings) -> IPv4Network:
    return IPv4Network(settings.local.subnet)


@contextmanager
def _alone(places: Places) -> Iterator[None]:
    """One command at a time changes a cloud."""
    places.lock.parent.mkdir(parents=True, exist_ok=True)
    with places.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
