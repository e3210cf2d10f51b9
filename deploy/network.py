"""Names and interfaces: hostname, /etc/hosts, and the interface that training talks over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pyinfra import host, logger
from pyinfra.api import deploy
from pyinfra.api.facts import FactBase
from pyinfra.facts.files import Directory
from pyinfra.operations import server

from deploy.managed import file_text, keep_file, managed, put_text
from deploy.node_files import outside, refuse, text_of, with_block
from deploy.node_operation import Commands, node_operation


def rewrite(text: str, own_name: str, addresses: Mapping[str, str]) -> str:
    """The file with exactly one line a node.

    `addresses` maps node name to private address. Lines elsewhere lose the cluster's names (stale addresses,
    `127.0.1.1 te1`), because the first match in the file wins and a node's own name must not be loopback.
    """
    ours = {own_name, *addresses}
    other_lines = [line for line in (_without(line, ours) for line in outside(text)) if line is not None]
    return with_block(other_lines, [f"{address} {name}" for name, address in addresses.items()])


def _without(line: str, names: set[str]) -> str | None:
    """The line without those names; None when no name is left. Untouched when it holds none of them."""
    entry, mark, comment = line.partition("#")
    address, *rest = entry.split() or [""]
    if not names.intersection(rest):
        return None if address == "127.0.1.1" else line
    left = [name for name in rest if name not in names]
    if not left or address == "127.0.1.1":
        return None
    return " ".join([address, *left]) + (f" {mark}{comment}" if mark else "")


def written_by_cloud_init(text: str) -> bool:
    """Whether cloud-init writes this file at every boot; the header of its template says so.

    Vendor data may ask for that, and vendor data outweighs /etc/cloud/cloud.cfg.d: the template needs the block.
    """
    return "manage_etc_hosts" in text


# The network interface training talks over, and why it is that one.


class InterfaceError(ValueError):
    """No interface carries the node's private address; the message names what there is."""


@dataclass(frozen=True)
class Interface:
    """An interface's exact name and the sentence that says why."""

    name: str
    reason: str


def choose_interface(addresses_json: str, route_json: str, private_address: str, head_address: str) -> Interface:
    """Pick from `ip -j address` and `ip -j route get HEAD` ("[]" where there is no route).

    The interface that holds the node's private address is the one; the route to the head must agree with it,
    except on the head itself, whose route to its own address is loopback. Raises InterfaceError.
    """
    holders = {
        info["local"]: link["ifname"] for link in json.loads(addresses_json) for info in link.get("addr_info", [])
    }
    name = holders.get(private_address)
    if name is None:
        raise InterfaceError(
            f"no interface has the private address {private_address}; this node has "
            + ", ".join(f"{address} on {link}" for address, link in holders.items())
            + "; correct private_address in cluster.toml"
        )
    if private_address == head_address:
        return Interface(name, f"{name} holds {private_address}, the head's own address")
    routed = next((route["dev"] for route in json.loads(route_json) if "dev" in route), None)
    if routed is None:
        raise InterfaceError(
            f"there is no route from {private_address} on {name} to the head {head_address}; "
            "use private addresses of one network in cluster.toml"
        )
    if routed != name:
        raise InterfaceError(
            f"the route to the head {head_address} leaves by {routed}, but {private_address} is on {name}; "
            "use private addresses of one network in cluster.toml"
        )
    return Interface(name, f"the route to the head {head_address} leaves by {name}, which holds {private_address}")


def nccl_conf(text: str, interface: Interface) -> str:
    """/etc/nccl.conf with our block before all else: the first line of a name counts for NCCL.

    `==` is NCCL's exact match: one `=` for the file's syntax, one for "not a prefix".
    """
    block = with_block([], [f"# {interface.reason}", f"NCCL_SOCKET_IFNAME=={interface.name}"])
    return block + "".join(f"{line}\n" for line in outside(text))


HOSTS, HOSTS_TEMPLATE = managed("/etc/hosts"), managed("/etc/cloud/templates/hosts.debian.tmpl")
NCCL_CONF = managed("/etc/nccl.conf")
NODE_FILE = managed("/etc/spotune/node.json")
CLOUD_INIT = managed("/etc/cloud/cloud.cfg.d/99-spotune.cfg")


NOTHING = "[]"


class IpJson(FactBase[list[str]]):
    """`ip -j address` and `ip -j route get HEAD`, as two JSON texts."""

    def command(self, head_address: str) -> str:
        # no route is an answer, and the route's command fails with it
        return f"ip -j address && {{ ip -j route get {head_address} 2>/dev/null || echo '{NOTHING}'; }}"

    def process(self, output: list[str]) -> list[str]:
        return [*(line for line in output if line.strip()), NOTHING, NOTHING][:2]

    @staticmethod
    def default() -> list[str]:
        return [NOTHING, NOTHING]


@deploy("Names and interfaces")
def name_nodes() -> None:
    """Every node under its own name, knowing all the others by private address."""
    if host.get_fact(Directory, path="/etc/cloud/cloud.cfg.d"):
        keep_file(name="cloud-init leaves names alone", path=CLOUD_INIT, text=text_of("cloud_init.cfg"))
    server.hostname(name="Hostname", hostname=host.data.node.name)
    manage_hosts_file(name="/etc/hosts")
    choose_network(name="Interface for NCCL and gloo")


@node_operation
def manage_hosts_file() -> Commands:
    """One managed block in /etc/hosts, and no other line that names a node; in cloud-init's template too."""
    node = host.data.node
    addresses = {other.name: other.private_address for other in host.data.cluster}
    for path in (HOSTS, HOSTS_TEMPLATE) if written_by_cloud_init(file_text(HOSTS) or "") else (HOSTS,):
        yield from put_text(path, rewrite(file_text(path) or "", node.name, addresses))


@node_operation
def choose_network() -> Commands:
    """This node's interface in /etc/nccl.conf and /etc/spotune/node.json; both hold the reason."""
    node, head = host.data.node, host.data.cluster[0]
    addresses, route = host.get_fact(IpJson, head_address=head.private_address)
    try:
        interface = choose_interface(addresses, route, node.private_address, head.private_address)
    except InterfaceError as error:
        yield refuse(str(error))
        return
    logger.info(f"{host.print_prefix}{interface.reason}")
    about = {
        "name": node.name,
        "rank": node.rank,
        "interface": interface.name,
        "private_address": node.private_address,
        "reason": interface.reason,
    }
    yield from put_text(NCCL_CONF, nccl_conf(file_text(NCCL_CONF) or "", interface))
    yield from put_text(NODE_FILE, json.dumps(about, indent=1) + "\n")
