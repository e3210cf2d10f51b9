"""Node: one machine of the cluster, as every other part of spotune sees it."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inventory.setting_types import SettingsError, is_address
from inventory.settings import Settings
from training.text.deferred import deferred

with deferred():
    from inventory import transport

SSH_CONFIG = Path("~/.ssh/config")
"""The user's own, as ssh itself reads it (`ssh -G`)."""
JUMP_HOST = re.compile(r"^(?:ssh://)?(?:(.+)@)?(?:\[(.*)\]|(.*?))(?::(\d+))?/?$")
"""What `ssh -G` prints of one: its user, its address if that is in brackets (IPv4 too), its name if not, its port."""


@dataclass(frozen=True)
class Node:
    """One machine. Rank 0 is the head: it builds, launches and holds the run folder."""

    name: str
    rank: int
    address: str
    """Where this machine reaches it by ssh."""
    private_address: str
    """Where the other nodes reach it."""
    user: str
    port: int
    key: Path
    known_hosts: Path
    gpus: int
    disk_serial: str | None = None
    price_h: float | None = None
    """What an hour of it costs; None where nobody said."""
    currency: str = ""
    card: str = ""
    """What kind its GPUs are; empty where nobody said."""
    type: str = ""
    """What its cloud calls machines of its kind; empty where no cloud was asked."""
    zone: str = ""
    machine_id: str = ""
    """By which its cloud knows the machine; empty where it is not rented."""
    stopped: bool = False
    """Whether its cloud says so."""
    through: Node | None = None
    """The jump host that this machine reaches it by; none of the cluster's own."""

    @property
    def hops(self) -> tuple[Node, ...]:
        """The jump hosts on the way to it, from here on."""
        return (*self.through.hops, self.through) if self.through else ()

    @property
    def slots(self) -> int:
        """Processes a run starts there: one a GPU, one on a node without any."""
        return max(1, self.gpus)


def static_nodes(settings: Settings) -> tuple[Node, ...]:
    """The machines listed in cluster.toml, in rank order. What it leaves open, ~/.ssh/config may say.

    Raises SettingsError where ssh refuses that file, or is missing.
    """
    ssh = settings.ssh
    chosen = ssh.model_dump(include=ssh.model_fields_set)
    nodes = []
    for rank, entry in enumerate(settings.nodes):
        node = Node(
            name=entry.name,
            rank=rank,
            address=entry.address,
            private_address=entry.private_address or "",
            user=ssh.user,
            port=ssh.port,
            key=ssh.key,
            known_hosts=ssh.known_hosts,
            gpus=entry.gpus,
            disk_serial=entry.disk_serial,
            price_h=entry.price_per_hour,
            currency=entry.currency,
            card=entry.card,
        )
        user, port, key = (getattr(entry, name) or chosen.get(name) for name in ("user", "port", "key"))
        node = _reached(node, user, port, key)
        nodes.append(replace(node, private_address=node.private_address or node.address))
    return tuple(nodes)


def unreachable_nodes(nodes: Sequence[Node]) -> Iterable[str]:
    """What keeps listed machines from being reached, one sentence each, with its key."""
    for key in dict.fromkeys(node.key for node in nodes if not node.key.is_file()):
        make = shlex.join(["ssh-keygen", "-t", "ed25519", "-f", str(key)])
        yield f"ssh.key: there is no private key at {key}; name another (nodes.key: of one machine) or: {make}"
    for node in nodes:
        if not is_address(node.private_address):
            yield (
                f"nodes.private_address: {node.name} has the name {node.private_address!r} as address; "
                "give the address the other nodes reach it by"
            )


def _reached(
    node: Node,
    user: str | None,
    port: int | None,
    key: Path | None = None,
    *,
    before: Sequence[str] = (),
    seen: tuple[str, ...] = (),
) -> Node:
    """The node as `ssh -i KEY -p PORT USER@ADDRESS` reaches it; a jump host for which the file names no key takes the
    machine's. `before`: the jump hosts that are named on the way, as USER@HOST:PORT or less of it; `seen`: those on
    whose way this node is."""
    values = _ssh_config(node.address, user, port, "" if seen else node.user)
    keys = [Path(os.path.expandvars(name)) for name in values["identityfile"] if name != "none"]
    key = key or next((name for name in keys if name.is_file()), next(iter(keys), node.key))
    # what `Host *` says of jumps is for a jump host too, but no way to a host leads through itself
    own = [hop for line in values.get("proxyjump", ()) for hop in line.split(",") if hop not in ("none", *seen)]
    through = None
    if jumps := before or own:
        *earlier, last = jumps
        ((login, in_brackets, name, place),) = JUMP_HOST.findall(last)
        host = in_brackets or name
        hop = replace(node, name=host, address=host, key=node.key if seen else key)
        through = _reached(hop, login, int(place or 0), before=earlier, seen=(*seen, last))
    return replace(
        node,
        address=values["hostname"][0],
        user=values["user"][0],
        port=int(values["port"][0]),
        key=key,
        through=through,
    )


def _ssh_config(host: str, user: str | None, port: int | None, usual_user: str) -> dict[str, list[str]]:
    """What `ssh -p PORT USER@HOST` would use, by the keys of ~/.ssh/config in small letters, with all tokens replaced.
    `usual_user`: where neither `user` nor the file names one; empty: ssh's own default."""
    file = SSH_CONFIG.expanduser()
    try:
        me = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SettingsError(f"user id {os.getuid()} has no name on this machine, and ssh needs one") from None
    options = [*(["-l", user] if user else []), *(["-p", str(port)] if port else []), "--", host]
    values = _printed("", "-F", str(file) if file.exists() else "none", *options)
    if usual_user and not user and values["user"] == [me]:  # named in the file, or ssh's own default
        config = f'Include "{file}"\nMatch all\nUser {usual_user}\n'
        values["user"] = _printed(config, "-F", "/dev/stdin", *options)["user"]
    tokens = {"%": "%", "d": str(Path.home()), "n": host, "u": me}
    tokens |= {"h": values["hostname"][0], "p": values["port"][0], "r": values["user"][0]}
    for key in ("identityfile", "proxyjump"):  # which `ssh -G` prints as they are in the file
        lines = (re.sub("^~(?=/)", "%d", line) for line in values.get(key, ()))
        values[key] = [re.sub("%(.)", lambda token: tokens.get(token[1], token[0]), line) for line in lines]
    return values


def _printed(config: str, *options: str) -> dict[str, list[str]]:
    """What `ssh -G` prints, by its keys; of IdentityFile "none" and then what the file has, not ssh's own defaults.
    `config` is what /dev/stdin holds."""
    argv, name = ["ssh", "-G", "-o", "IdentityFile=none", *options], options[-1]
    try:
        done = subprocess.run(argv, input=config, capture_output=True, check=False, errors="replace")
    except FileNotFoundError:
        raise SettingsError(f"there is no ssh here, which reads {SSH_CONFIG}: install the OpenSSH client") from None
    if done.returncode:
        raise SettingsError(f"{SSH_CONFIG} cannot be read for {name}: {' | '.join(done.stderr.splitlines())}")
    values: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    return values


def price_of(nodes: Sequence[Node]) -> tuple[float | None, str]:
    """What an hour of nodes costs together, and in which currency; None unless each says it, in the same one."""
    prices, currencies = [node.price_h for node in nodes], {node.currency for node in nodes}
    if len(currencies) != 1 or any(price is None for price in prices):
        return None, ""
    return sum(price or 0.0 for price in prices), currencies.pop()


def pyinfra_hosts(settings: Settings, nodes: Sequence[Node], files: Path) -> list[tuple[str, dict[str, Any]]]:
    """Nodes as pyinfra inventory entries; deploys read `host.data.node`, `.cluster` and `.settings`.

    `files`: a folder with `known_hosts` and `ssh_config` (see pyinfra_ssh_config), which stand for the user's own.
    """
    return [
        (
            node.name,
            {
                "node": node,
                "cluster": tuple(nodes),
                "settings": settings,
                "ssh_hostname": f"{node.name}.spotune" if node.through else node.address,
                "ssh_port": node.port,
                "ssh_user": node.user,
                "ssh_key": str(node.key),
                "ssh_config_file": str(files / "ssh_config"),
                "ssh_known_hosts_file": str(files / "known_hosts"),
                "ssh_strict_host_key_checking": "yes",
                "ssh_connect_retries": 3,
                "ssh_paramiko_connect_kwargs": {"transport_factory": transport.prompt_transport},
                "_sudo": node.user != "root",
            },
        )
        for node in nodes
    ]


def pyinfra_ssh_config(nodes: Sequence[Node], known_hosts: Path) -> str:
    """The way through jump hosts, which pyinfra takes from such a file alone, their host keys verified too."""
    lines = ["Host *", "  StrictHostKeyChecking yes", f"  UserKnownHostsFile {known_hosts}"]
    for node in nodes:
        # behind an IPv6 address pyinfra reads no port: that is in the address's own entry
        jumps = [f"{hop.user}@{hop.address}" + ("" if ":" in hop.address else f":{hop.port}") for hop in node.hops]
        if jumps:
            lines += [f"Host {node.name}.spotune", f"  HostName {node.address}", f"  ProxyJump {','.join(jumps)}"]
        for hop in node.hops:
            lines += [f"Host {hop.address}", f"  IdentityFile {hop.key}"]
            lines += [f"  Port {hop.port}"] if ":" in hop.address and hop.port != 22 else []
    return "".join(f"{line}\n" for line in lines)
