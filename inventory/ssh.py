"""The one place that opens ssh connections: host keys verified, nothing accepted on first sight."""

from __future__ import annotations

import logging
import shlex
import socket
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import paramiko
from fabric import Config, Connection
from invoke.exceptions import ThreadException

from inventory.errors import InventoryError
from inventory.nodes import Node

# What ends one of its threads, paramiko logs with a traceback besides raising it; without a handler that is stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

Answer = TypeVar("Answer")
CONNECT_TIMEOUT_S = 10
LINK_TIMEOUT_S = 30
"""A node that acknowledges nothing for so long is gone, whatever the command on it was given."""
RENTED = " (of rented machines: `fab up`)"
"""Their keys come over the cloud's own channel."""
RUN_TIMEOUT_S = 600
ASK_TIMEOUT_S = 60
MAX_ANSWER = 64 << 20
"""Characters that a command may print; whoever prints more is cut off."""


class SshError(InventoryError, RuntimeError):
    """A node could not be reached or refused us; the message names it and the reason."""


class HostKeyError(SshError):
    """It shows no host key that we know it by."""


def connect(node: Node, timeout_s: int = CONNECT_TIMEOUT_S) -> Connection:
    """An open connection to a node, to be used in a `with`. Raises SshError naming the node and what to do."""
    connection = Connection(
        node.address,
        user=node.user,
        port=node.port,
        connect_timeout=timeout_s,
        config=Config(overrides={"load_ssh_configs": False}),
        connect_kwargs={
            "key_filename": str(node.key),
            "allow_agent": True,  # for a key with a passphrase; the key itself is tried first
            "look_for_keys": False,
            "banner_timeout": timeout_s,
            "auth_timeout": timeout_s,
        },
    )
    try:
        connection.client.load_host_keys(str(node.known_hosts))
        connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
        connection.open()
        _watch(connection.transport)
    except Exception as error:
        connection.close()
        kind = HostKeyError if _unknown_host(node, error) else SshError
        raise kind(f"{node.name} ({node.address}:{node.port}): {_reason(node, error)}") from error
    return connection


def _watch(transport: Any) -> None:
    """Let the connection end by itself once the node is gone; paramiko would wait for its answer for ever."""
    transport.set_keepalive(5)
    transport.channel_timeout = LINK_TIMEOUT_S
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; elsewhere the commands' own limits end the wait
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_TIMEOUT_S * 1000)


def _unknown_host(node: Node, error: Exception) -> bool:
    if isinstance(error, FileNotFoundError):
        return bool(error.filename == str(node.known_hosts))
    rejected = isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error)  # paramiko's words
    return rejected or isinstance(error, paramiko.BadHostKeyException)


def _reason(node: Node, error: Exception) -> str:
    unknown = _unknown_host(node, error)
    if isinstance(error, FileNotFoundError) and unknown:
        return f"there is no {node.known_hosts} yet; `fab trust` shows the host's fingerprint and makes it{RENTED}"
    if isinstance(error, FileNotFoundError):
        return f"no such file: {error.filename}"
    if isinstance(error, paramiko.BadHostKeyException):
        return f"its host key is not the one in {node.known_hosts}; rebuilt? see `fab trust`{RENTED}"
    if isinstance(error, paramiko.AuthenticationException) and _has_passphrase(node.key):
        return f"the key {node.key} has a passphrase; add it to your agent: ssh-add {shlex.quote(str(node.key))}"
    if isinstance(error, paramiko.AuthenticationException):
        return f"it refuses the key {node.key} for user {node.user}"
    if unknown:
        return f"its host key is not in {node.known_hosts}; `fab trust` shows the fingerprint and adds it{RENTED}"
    said = str(error).removeprefix("[Errno None] ")  # as paramiko begins where each address refused
    return f"cannot be reached: {said or type(error).__name__}"


def _has_passphrase(key: Path) -> bool:
    """Whether a key file is encrypted; paramiko tells it only of the last of the key types it tries."""
    try:
        paramiko.PKey.from_path(key)
    except (paramiko.PasswordRequiredException, TypeError):  # cryptography's own word for it, which comes through
        return True
    except (paramiko.SSHException, OSError, ValueError):
        return False
    return False


def run(connection: Connection, command: str, *, timeout_s: float = RUN_TIMEOUT_S) -> str:
    """Run a shell command as root on the node and return its stdout.

    Raises SshError with the command's last words when it fails; and when it has not ended after `timeout_s`, which
    gives the connection up too.
    """
    line = root_line(connection, command)
    result = _within(timeout_s, connection, line, textwrap.shorten(command, 60, placeholder=" ..."))
    if result.failed:
        words = (result.stderr or result.stdout).strip().splitlines()
        raise SshError(
            f"{connection.host}: {command.split(maxsplit=1)[0]} ended with {result.exited}: "
            f"{words[-1] if words else 'no message'}"
        )
    return str(result.stdout)


def root_line(connection: Connection, command: str) -> str:
    """The command line that runs a shell command as root."""
    return command if connection.user == "root" else f"sudo -n sh -c {shlex.quote(command)}"


def _within(timeout_s: float, connection: Connection, line: str, command: str) -> Any:
    """The finished command's result. Closing the connection is what ends a wait in any of paramiko's places."""
    given_up, left = list[str](), [MAX_ANSWER]

    def give_up(reason: str) -> None:
        given_up.append(reason)
        connection.transport.close()

    def count(text: str) -> None:
        left[0] -= len(text)
        if left[0] < 0:
            give_up(f"its answer has more than {MAX_ANSWER} characters")

    counted = SimpleNamespace(write=count, flush=lambda: None)  # in place of a terminal
    timer = threading.Timer(timeout_s, give_up, [f"not done after {timeout_s:g} s"])
    timer.daemon = True
    timer.start()
    reason: object = "the connection broke"
    try:
        result = connection.run(line, out_stream=counted, err_stream=counted, warn=True, in_stream=False)
        if result.exited >= 0:
            return result
    except (paramiko.SSHException, OSError, EOFError, ThreadException) as error:
        reason = str(error) or reason
    finally:
        timer.cancel()
    raise SshError(f"{connection.host}: `{command}`: {given_up[0] if given_up else reason}")


@contextmanager
def tunnel(node: Node, port: int) -> Iterator[int]:
    """Inside the `with`, the port of this machine's 127.0.0.1 that leads to a port of the node's own: the same
    number where it is free here."""
    with connect(node) as connection, forwarded(connection, port, port) as local_port:
        yield local_port


@contextmanager
def forwarded(connection: Connection, port: int, wanted: int) -> Iterator[int]:
    """The same over a connection that is open; the port here is `wanted` where that is free."""
    local_port = _free_port(wanted)
    forward = connection.forward_local(local_port, port, "127.0.0.1", "127.0.0.1")
    forward.__enter__()
    try:
        yield local_port
    finally:
        with suppress(ThreadException):  # one of the links through it broke, as they do when the run ends
            forward.__exit__(None, None, None)


def _free_port(wanted: int) -> int:
    try:
        socket.create_server(("127.0.0.1", wanted)).close()
    except OSError:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return int(free.getsockname()[1])
    return wanted


def ask(node: Node, command: str, *, timeout_s: float = ASK_TIMEOUT_S) -> str:
    """`run` one command over a connection of its own, which is closed again."""
    with connect(node) as connection:
        return run(connection, command, timeout_s=timeout_s)


def on_all(nodes: Sequence[Node], work: Callable[[Node], Answer]) -> dict[str, Answer | Exception]:
    """Do `work(node)` for all nodes at once; each node's answer, or the exception it ended with."""

    def guarded(node: Node) -> Answer | Exception:
        try:
            return work(node)
        except Exception as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, min(32, len(nodes)))) as pool:
        return dict(zip([n.name for n in nodes], pool.map(guarded, nodes), strict=True))
