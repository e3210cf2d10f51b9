"""One host: its root file system over the image, its identity, its boot and its end."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

from inventory.localcloud import disk, image, inside, shape
from inventory.localcloud.commands import (
    MOUNTINFO,
    LocalCloudError,
    attempt,
    mounts_below,
    remove_tree,
    run,
    unmount_below,
)
from inventory.localcloud.image import TOOLS
from inventory.localcloud.network import INTERFACES, gateway, nameservers_file
from inventory.localcloud.places import Places

BOOT_TIMEOUT_S = 90
LINK_TIMEOUT_S = 10
PROPAGATION = Path("/run/systemd/nspawn/propagate")
"""systemd-nspawn makes an empty folder per machine there and leaves it."""
WHEELHOUSES = Path("/opt/spotune/wheelhouses")
"""Where hosts see this machine's cached wheels, read-only."""

# `reboot` in a host ends systemd-nspawn with code 133 when it keeps the caller's unit: start it again, as a
# machine would. The network namespace of the last boot goes a moment after its processes; a cable of the same
# name cannot be laid before, and a new cable is as fast as it goes. Arguments: link, a command beside every boot,
# cgroup folders, "--", the systemd-nspawn command.
KEEPER = """\
link=$1; beside=$2; shift 2
groups=
while [ "$1" != -- ]; do groups="$groups $1"; shift; done
shift
for group in $groups; do echo $$ >"$group/keeper/cgroup.procs" || exit; done
while :; do
    sh -c "$beside" &
    (for group in $groups; do sh -c 'echo $PPID' >"$group/cgroup.procs" || exit; done; exec "$@")
    [ $? = 133 ] || exit
    while ip link show "$link" >/dev/null 2>&1; do ip link delete "$link"; sleep 0.1; done
done
"""


@dataclass(frozen=True)
class LocalHost:
    """One machine to boot: what it is called here and there, its address, its data disks."""

    name: str
    hostname: str
    address: str
    disks: Mapping[str, Path] = field(default_factory=dict)
    """Serial -> image, in the order the host sees them: vdb, vdc, ..."""
    authorized_keys: str = ""


def nspawn_command(places: Places, host: LocalHost) -> list[str]:
    """The command that boots a host. Pure."""
    return [
        "systemd-nspawn",
        "--quiet",
        "--boot",
        "--register=no",
        "--keep-unit",
        f"--directory={places.root(host.name)}",
        f"--machine={places.machine(host.name)}",
        f"--hostname={host.hostname}",
        f"--network-bridge={places.bridge}",
        "--resolv-conf=off",
        "--timezone=off",
        "--link-journal=no",
        "--console=read-only",
        # Pinned memory and raised limits, as on a machine of one's own.
        "--capability=CAP_IPC_LOCK,CAP_SYS_RESOURCE",
        f"--bind-ro={image.folder()}:{WHEELHOUSES}",
        "systemd.show_status=1",
    ]


def network_file(host: LocalHost, subnet: IPv4Network) -> str:
    """The host's static address, for systemd-networkd. Pure."""
    return (
        "[Match]\nName=host0\n\n"
        f"[Network]\nAddress={host.address}/{subnet.prefixlen}\nGateway={gateway(subnet)}\n"
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    )


def prepare(places: Places, host: LocalHost, subnet: IPv4Network) -> None:
    """Everything a boot needs: root file system, identity, disks. Repeating it changes nothing."""
    root = places.root(host.name)
    if not mounts_below(MOUNTINFO.read_text(), root.resolve()):
        _mount_root(places, host.name)
    if not (root / TOOLS / "address").exists():
        _give_identity(places, host, root, subnet)
    list_disks(places, host.name, host.disks)
    if places.wheels.exists():
        show_wheels(places, host.name)


def list_disks(places: Places, name: str, disks: Mapping[str, Path]) -> None:
    """Name a host's disks (serial -> image) in its table, for its next boot or the next `attach-disks` there."""
    attached = [(disk.attach(image), serial) for serial, image in disks.items()]
    listed = disk.renewed_table(attached_disks(places, name), attached)
    (places.root(name) / TOOLS / "disks").write_text(listed)


def attached_disks(places: Places, name: str) -> str:
    """A host's table of disks; empty where it has none yet."""
    table = places.root(name) / TOOLS / "disks"
    return table.read_text() if table.exists() else ""


def _mount_root(places: Places, name: str) -> None:
    folder, image = places.host(name), places.base_image
    for part in ("upper", "work", "root"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if not image.exists():
        raise LocalCloudError(f"its image {image.readlink()} is gone; `fab local.down`, then `fab local.serve`")
    options = f"lowerdir={image.resolve()},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    run("mount", "-t", "overlay", "overlay", "-o", options, folder / "root")


def _give_identity(places: Places, host: LocalHost, root: Path, subnet: IPv4Network) -> None:
    (root / "etc/hostname").write_text(f"{host.hostname}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.hostname}\n::1 localhost\n")
    resolv_conf = Path("/etc/resolv.conf").read_text()
    (root / "etc/resolv.conf").write_text(nameservers_file(resolv_conf).read_text())
    (root / "etc/systemd/network/10-host0.network").write_text(network_file(host, subnet))
    run("ssh-keygen", "-q", "-A", "-f", root)
    ssh = root / "root/.ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    (ssh / "authorized_keys").write_text(host.authorized_keys)
    (ssh / "authorized_keys").chmod(0o600)
    # Last: what stands above is complete where this file is.
    (root / TOOLS / "address").write_text(f"{host.address}\n")


def show_wheels(places: Places, name: str) -> None:
    """Name the cloud's wheelhouse in a host, for its next boot or the next `attach-wheels` there."""
    (places.root(name) / TOOLS / "wheels").write_text(places.wheels.read_text())


def start(places: Places, host: LocalHost) -> None:
    """Power on. Returns at once; the host outlives this process and its terminal."""
    folders = inside.folders(places.group(host.name))
    for folder in folders:
        (folder / "keeper").mkdir(parents=True, exist_ok=True)
    image.folder().mkdir(parents=True, exist_ok=True)
    groups = [str(folder) for folder in folders]
    with places.console(host.name).open("ab") as console:
        subprocess.Popen(
            [
                "sh",
                "-c",
                KEEPER,
                "keeper",
                places.link(host.name),
                shape.at_boot(places, host.name),
                *groups,
                "--",
                *nspawn_command(places, host),
            ],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )


def is_running(places: Places, name: str) -> bool:
    """Whether any process of the host lives."""
    return bool(inside.pids(places.group(name)))


def stop(places: Places, name: str) -> None:
    """Power off at once, as a pulled plug: nothing in the host is asked."""
    inside.kill(places.group(name))
    inside.remove(places.group(name))
    left = PROPAGATION / places.machine(name)
    if left.is_dir():
        left.rmdir()
    deadline = time.monotonic() + LINK_TIMEOUT_S
    while (INTERFACES / places.link(name)).exists():
        if time.monotonic() > deadline:
            raise LocalCloudError(f"{name}: its network link {places.link(name)} does not go away")
        attempt("ip", "link", "delete", places.link(name))
        time.sleep(0.05)


def discard(places: Places, name: str) -> None:
    """Remove what a stopped host was made of; its data disks lie elsewhere."""
    unmount_below(places.root(name))
    remove_tree(places.host(name))


def wait_for_ssh(places: Places, name: str, address: str, timeout_s: int = BOOT_TIMEOUT_S) -> None:
    """Return when sshd greets. Raises LocalCloudError with the console's last lines when it does not."""
    deadline = time.monotonic() + timeout_s
    while not _greets(address):
        if not is_running(places, name):
            raise LocalCloudError(f"{name} stopped while booting{last_words(places, name)}")
        if time.monotonic() > deadline:
            silent = f"{name} ({address}) does not answer ssh after {timeout_s} s"
            raise LocalCloudError(f"{silent}{last_words(places, name)}")
        time.sleep(0.2)


def _greets(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=2) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def last_words(places: Places, name: str) -> str:
    """The end of what a host said on its console."""
    console = places.console(name)
    lines = console.read_text(errors="replace").splitlines()[-8:] if console.exists() else []
    return f"; the end of {shlex.quote(str(console))}:" + "".join(f"\n    {line}" for line in lines)
