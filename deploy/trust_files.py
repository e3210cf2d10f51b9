"""The files that let the nodes of one cluster, and nobody else, reach each other by ssh. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.managed_block import outside, with_block
from deploy.node_files import shell, text_of
from deploy.refusal import REFUSED

KEY_PATH = "/root/.ssh/id_cluster"
SSHD_DROP_IN = "/etc/ssh/sshd_config.d/10-spotune.conf"
SSHD_CONFIG = text_of("sshd.conf")
"""sshd drop-in. sshd takes the first value it meets, so the file sorts before 50-cloud-init.conf."""


@dataclass(frozen=True)
class NodeKeys:
    """What a node shows of itself: the public halves, as `type base64`."""

    name: str
    private_address: str
    cluster_key: str
    host_key: str


def public_key(line: str) -> str:
    """`type base64` of a public key line, its comment dropped."""
    return " ".join(line.split()[:2])


def authorized_keys(text: str, peers: Sequence[NodeKeys]) -> str:
    """root's authorized_keys: what stands there already, and one block with a line a node.

    Each key is good only from its own node's private address, and for nothing but commands.
    """
    lines = [
        f'from="{p.private_address}",no-agent-forwarding,no-port-forwarding,no-X11-forwarding '
        f"{p.cluster_key} spotune:{p.name}"
        for p in peers
    ]
    return with_block(outside(text), lines)


def known_hosts(text: str, peers: Sequence[NodeKeys]) -> str:
    """/etc/ssh/ssh_known_hosts: one line a node, under its name and its private address.

    Lines elsewhere in the file that speak of those names or addresses are dropped: they are older than ours.
    """
    ours = {known for p in peers for known in (p.name, p.private_address)}
    kept = [line for line in outside(text) if not ours.intersection(line.split(" ")[0].split(","))]
    return with_block(kept, [f"{p.name},{p.private_address} {p.host_key}" for p in peers])


def client_config(names: Sequence[str], addresses: Sequence[str]) -> str:
    """/etc/ssh/ssh_config.d/10-spotune.conf: how one node calls another. Strict, silent, and soon to notice
    that the other side is gone (15 s): a launcher must not hang on a machine that was taken away.
    """
    return text_of("ssh_client.conf", hosts=" ".join([*names, *addresses]), key=KEY_PATH)


def look_at_sshd(drop_in: str = SSHD_DROP_IN) -> str:
    """Shell that prints every reason why password logins may still be possible, or one line: shut."""
    return shell("open_logins.sh", "look_at_sshd.sh", file=drop_in)


def apply_sshd(drop_in: str = SSHD_DROP_IN) -> str:
    """Shell that puts DROP_IN.new in DROP_IN's place and has sshd take it up, or leaves all as it was."""
    return shell("open_logins.sh", "apply_sshd.sh", file=drop_in, refused=REFUSED)
