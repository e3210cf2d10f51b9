"""Names and interfaces: hostname, /etc/hosts, and which interface training talks over."""

from __future__ import annotations

import json

from pyinfra import host, logger
from pyinfra.api import deploy
from pyinfra.api.facts import FactBase
from pyinfra.facts.files import Directory
from pyinfra.operations import files, server

from deploy.hosts_file import rewrite, written_by_cloud_init
from deploy.interface import InterfaceError, choose_interface, nccl_conf
from deploy.node_files import FOLDER
from deploy.node_operation import Commands, file_text, node_operation, put_text
from deploy.refusal import refuse

HOSTS, HOSTS_TEMPLATE = "/etc/hosts", "/etc/cloud/templates/hosts.debian.tmpl"


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
        files.put(
            name="cloud-init leaves names alone",
            src=str(FOLDER / "cloud_init.cfg"),
            dest="/etc/cloud/cloud.cfg.d/99-spotune.cfg",
            mode="644",
        )
    server.hostname(name="Hostname", hostname=host.data.node.name)
    manage_hosts_file(name="/etc/hosts")
    choose_network(name="Interface for NCCL and gloo")


@node_operation
def manage_hosts_file() -> Commands:
    """One managed block in /etc/hosts, and no other line that names a node; in cloud-init's template too."""
    node = host.data.node
    addresses = {other.name: other.private_address for other in host.data.cluster}
    for path in (HOSTS, HOSTS_TEMPLATE) if written_by_cloud_init(file_text(HOSTS) or "") else (HOSTS,):
        current = file_text(path) or ""
        wanted = rewrite(current, node.name, addresses)
        if wanted != current:
            yield from put_text(path, wanted)


@node_operation
def choose_network() -> Commands:
    """/etc/nccl.conf and /etc/spotune/node.json with this node's interface; both hold the reason."""
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
    yield from put_text("/etc/nccl.conf", nccl_conf(interface))
    yield from put_text("/etc/spotune/node.json", json.dumps(about, indent=1) + "\n")
