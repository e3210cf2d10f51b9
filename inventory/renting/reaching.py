"""Whether new machines answer ssh yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from inventory.nodes import Node

Reach = Callable[[Sequence[Node]], None]
ANSWER_S = 180.0
POLL_S = 3.0


def with_new_keys(reach: Reach, pin_again: Callable[[], None]) -> Reach:
    """`reach`; where a node shows another host key than is pinned, the cloud is asked once more which it has."""
    from inventory.ssh import SshError

    def reached(nodes: Sequence[Node]) -> None:
        try:
            reach(nodes)
        except SshError as error:
            if not _is_other_key(error):
                raise
            pin_again()
            reach(nodes)

    return reached


def _is_other_key(error: BaseException) -> bool:
    """paramiko's word for it lies under ours."""
    import paramiko

    return isinstance(error.__cause__, paramiko.BadHostKeyException)


def by_ssh(nodes: Sequence[Node]) -> None:
    """Return when every node answers ssh with the host key that is pinned. Raises the SshError of one that does not."""
    from inventory import ssh

    until = time.monotonic() + ANSWER_S
    while True:
        answers = ssh.on_all(nodes, lambda node: ssh.ask(node, "true"))
        failed = [error for node in nodes if isinstance(error := answers[node.name], Exception)]
        nodes = [node for node in nodes if isinstance(answers[node.name], Exception)]
        if not nodes:
            return
        if other := [error for error in failed if _is_other_key(error)]:
            raise other[0]  # waiting does not mend it
        if time.monotonic() > until:
            raise failed[0]
        time.sleep(POLL_S)
