"""ssh between the nodes of one cluster, and nobody else: keys made on the nodes, host keys read over connections that
are verified already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gevent.lock import BoundedSemaphore  # type: ignore[import-untyped]
from pyinfra import host, logger, state
from pyinfra.api import Host, deploy
from pyinfra.api.facts import FactBase

from deploy.managed import file_text, keep_file, managed, put_text
from deploy.node_files import REFUSED, outside, shell, text_of, with_block
from deploy.node_operation import Commands, node_operation

KEY_PATH = "/root/.ssh/id_cluster"
SSHD_DROP_IN = managed("/etc/ssh/sshd_config.d/10-spotune.conf")
SSHD_CONFIG = text_of("sshd.conf")
"""sshd drop-in. sshd takes the first value it meets, so the file sorts before 50-cloud-init.conf."""


@dataclass(frozen=True)
class NodeKeys:
    """What a node shows of itself: the public halves, as `type base64`."""

    name: str
    private_address: str
    cluster_key: str
    host_key: str


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
    other_lines = [line for line in outside(text) if not ours.intersection(line.split(" ")[0].split(","))]
    return with_block(other_lines, [f"{p.name},{p.private_address} {p.host_key}" for p in peers])


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


AUTHORIZED_KEYS = managed("/root/.ssh/authorized_keys")
KNOWN_HOSTS = managed("/etc/ssh/ssh_known_hosts")
CLIENT_CONFIG = managed("/etc/ssh/ssh_config.d/10-spotune.conf")


class PublicKeys(FactBase[list[str]]):
    """The node's cluster key and its host key, public halves without comments; [] until both exist."""

    default = list

    def command(self) -> str:
        return f"cat {KEY_PATH}.pub /etc/ssh/ssh_host_ed25519_key.pub 2>/dev/null || true"

    def process(self, output: list[str]) -> list[str]:
        return [" ".join(line.split()[:2]) for line in output if line.startswith("ssh-ed25519 ")]


class OpenLogins(FactBase[list[str]]):
    """Why password logins may still be possible, one reason a line; [] where they are off."""

    def command(self) -> str:
        return look_at_sshd()

    def process(self, output: list[str]) -> list[str]:
        return [line for line in output if line != "shut"]

    @staticmethod
    def default() -> list[str]:
        return ["sshd was not asked"]


@deploy("Trust between the nodes")
def share_trust() -> None:
    """Any node reaches any node of this cluster as root, by name; nobody else gains anything."""
    cluster = host.data.cluster
    make_cluster_key(name="This node's own key")
    authorize_nodes(name="Keys of the cluster's nodes")
    know_nodes(name="Host keys of the cluster's nodes")
    names, addresses = [n.name for n in cluster], [n.private_address for n in cluster]
    keep_file(name="ssh between nodes", path=CLIENT_CONFIG, text=client_config(names, addresses))
    close_password_login(name="No password logins")


@node_operation
def make_cluster_key() -> Commands:
    """An ed25519 key that never leaves the node."""
    if _keys_of(host) is not None:
        host.noop("the node has its key")
        return
    yield "install -d -m 700 /root/.ssh"
    yield "ssh-keygen -A >/dev/null"
    yield f"test -s {KEY_PATH}.pub || ssh-keygen -q -t ed25519 -N '' -C spotune:{host.data.node.name} -f {KEY_PATH}"
    _keys_of(host)


def _keys_of(node: Host) -> list[str] | None:
    """A node's two public keys; None until both exist. Each node is asked once, though every node needs them.

    What the preparing pass saw is not taken for true while operations run, and "none yet" is only kept by the
    preparing pass, during which no key can appear.
    """
    cached: dict[tuple[bool, str], list[str]] = vars(node.state).setdefault("spotune_keys", {})
    asking: dict[str, BoundedSemaphore] = vars(node.state).setdefault("spotune_asking", {})
    at = (state.is_executing, node.name)
    with asking.setdefault(node.name, BoundedSemaphore()):
        if at not in cached:
            keys = node.get_fact(PublicKeys)
            if len(keys) < 2 and state.is_executing:
                return None
            cached[at] = keys
    return cached[at] if len(cached[at]) == 2 else None


def _peers() -> list[NodeKeys]:
    """Keys of the nodes this run reaches. A node that is down is left out until a run sees it."""
    peers = []
    for node in host.data.cluster:
        other: Host | None = state.inventory.get_host(node.name)
        if other is None or other in state.failed_hosts:
            continue
        if (keys := _keys_of(other)) is not None:
            peers.append(NodeKeys(node.name, node.private_address, *keys))
    return peers


@node_operation
def authorize_nodes() -> Commands:
    """root's authorized_keys holds one line a node; a node that left has none."""
    current = file_text(AUTHORIZED_KEYS) or ""
    yield from _write(AUTHORIZED_KEYS, current, authorized_keys(current, _peers()), mode="600")


@node_operation
def know_nodes() -> Commands:
    """/etc/ssh/ssh_known_hosts holds one line a node."""
    current = file_text(KNOWN_HOSTS) or ""
    peers = _peers()
    missing = [n.name for n in host.data.cluster if n.name not in {p.name for p in peers}]
    if missing:
        logger.warning(f"{host.print_prefix}not trusted, for they did not answer: {', '.join(missing)}")
    yield from _write(KNOWN_HOSTS, current, known_hosts(current, peers), mode="644")


@node_operation
def close_password_login() -> Commands:
    """Keys only, whatever other files say: sshd's own answer counts, not this file's text."""
    if file_text(SSHD_DROP_IN) == SSHD_CONFIG and not host.get_fact(OpenLogins):
        host.noop("password logins are off")
        return
    yield from put_text(f"{SSHD_DROP_IN}.new", SSHD_CONFIG)
    yield apply_sshd()


def _write(path: str, current: str, wanted: str, mode: str) -> Commands:
    if wanted == current:
        host.noop(f"{path} is as it should be")
        return
    yield from put_text(path, wanted, mode)
