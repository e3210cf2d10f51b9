"""Small programs sent to a node over ssh, that tell how far they are: JSON lines out, and they end with their input.

So nothing is left behind by Ctrl-C, a closed laptop or a lost network.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inventory.nodes import Node
from inventory.ssh import SshError, ask, connect, on_all

CHECKOUT = Path(__file__).parents[1]
Heard = Callable[[dict[str, Any]], None]
COPY_TIMEOUT_S = 300
MOUNTED_S = 120
"""From the beginning of a base deploy until its first steps have mounted a disk."""
PRIVATE_MOUNTS = ("unshare", "--mount")
"""What a program mounts is seen by it alone, and gone with it, however it ends."""


def program(name: str) -> str:
    """The text of a node's program."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def look(node: Node, deploy_command: str) -> dict[str, Any]:
    """What lies on a node's data disk (look.py). Raises SshError, also where no disk is mounted at /data yet, which
    `deploy_command` does."""
    seen: dict[str, Any] = json.loads(ask(node, "python3 - /data", stdin=program("look.py")))
    if not seen["mounted"]:
        raise SshError(f"{node.name}: no disk is mounted at /data yet: {deploy_command}")
    return seen


def wait_for_data(nodes: Sequence[Node]) -> None:
    """Return when every node has a disk mounted at /data. Raises SshError where one has none in time."""
    look_again = f"for _ in $(seq {MOUNTED_S * 2}); do mountpoint -q /data && exit; sleep 0.5; done; exit 1"
    for answer in on_all(nodes, lambda node: ask(node, look_again, timeout_s=MOUNTED_S + 30)).values():
        if isinstance(answer, Exception):
            raise answer


def keep_packages(node: Node, source: str) -> tuple[int, int]:
    """What apt has fetched there, kept on its data disk by the program `source`: (packages, bytes). Raises SshError."""
    told = json.loads(ask(node, "python3 -", stdin=source, timeout_s=COPY_TIMEOUT_S))
    return told["packages"], told["bytes"]


def follow(
    node: Node, name: str, question: Any, heard: Heard, stop: threading.Event, *, prefix: Sequence[str] = ()
) -> None:
    """Run a program on a node as root until it ends or `stop` is set; every line of JSON it prints goes to `heard`.

    Raises SshError with its last words where it ends badly or the connection breaks.
    """
    argv = [*prefix, "python3", "-c", program(name), json.dumps(question)]
    with connect(node) as connection:
        line = shlex.join(argv if connection.user == "root" else ["sudo", "-n", *argv])
        channel = connection.transport.open_session()
        try:
            channel.set_combine_stderr(True)
            channel.exec_command(line)
            words = _listen(channel.makefile("rb"), heard, stop)
            code = 0 if stop.is_set() else channel.recv_exit_status()
        except (EOFError, OSError) as error:
            raise SshError(f"{node.name}: {name}: the connection broke: {error or type(error).__name__}") from error
        finally:
            channel.close()
    if code:
        raise SshError(f"{node.name}: {words[-1] if words else f'{name} ended with {code}, or the connection did'}")


def _listen(lines: Any, heard: Heard, stop: threading.Event) -> list[str]:
    """Hand on what is JSON; gives the last of what is not."""
    words: deque[str] = deque(maxlen=5)
    for raw in lines:
        if stop.is_set():
            break
        text = raw.decode("utf-8", errors="replace").strip()
        if text.startswith("{"):
            heard(json.loads(text))
        elif text:
            words.append(text)
    return list(words)
