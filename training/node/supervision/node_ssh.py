"""How the head reaches the other nodes: the system's ssh, by the ssh_config of the cluster."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from training.framed import Frame
from training.launch import MASTER_PORTS, Host, Launch

PING_TIMEOUT_S = 3.0


class NodeError(RuntimeError):
    """A node is not fit to start the run; carries its name."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def master_port(head: str, skip: int = 0) -> int:
    """The first port of a free pair in MASTER_PORTS on this machine, `skip` pairs tried last; else NodeError."""
    pairs = MASTER_PORTS[::2]
    skip %= len(pairs)
    for port in [*pairs[skip:], *pairs[:skip]]:
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("", port))
            second.bind(("", port + 1))
            return port
    raise NodeError(head, f"no two ports in a row are free from {MASTER_PORTS[0]} to {MASTER_PORTS[-1]}")


def ssh(node: str, command: str, timeout_s: float) -> str:
    """What a command on a node printed, reached by its ssh_config; raises NodeError with ssh's own words."""
    frame = Frame()
    argv = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", node, frame.around(command)]
    answer, _ = frame.split(output_of(argv, node, timeout_s))
    return answer or ""


def on_node(launch: Launch, node: str, command: str, timeout_s: float) -> str:
    """The same, for a run that may be on this machine alone."""
    return output_of(["sh", "-c", command], node, timeout_s) if launch.here else ssh(node, command, timeout_s)


def output_of(argv: list[str], node: str, timeout_s: float) -> str:
    """A program's output; raises NodeError for the node it concerns, with the program's last words."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise NodeError(node, f"{argv[0]} to it took more than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.strip() and "rsync error:" not in line]
        raise NodeError(node, words[-1] if words else f"{argv[0]} ended with code {done.returncode}")
    return done.stdout


def on_hosts(hosts: tuple[Host, ...], work: Callable[[Host], object]) -> list[NodeError]:
    """Do something for all nodes at once; the errors, in rank order."""

    def guarded(host: Host) -> NodeError | None:
        try:
            work(host)
        except NodeError as error:
            return error
        return None

    if not hosts:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return [error for error in pool.map(guarded, hosts) if error is not None]


def ssh_port(name: str) -> int:
    """The port ssh would take for a node."""
    text = output_of(["ssh", "-G", name], name, 5)
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("port ")), 22)


def answers(address: str, port: int) -> bool:
    """Whether a machine answers at all; a refused connection is an answer."""
    try:
        socket.create_connection((address, port), timeout=PING_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
