"""The one place that opens ssh connections: host keys verified, nothing accepted on first sight."""

from __future__ import annotations

import logging
import shlex
import socket
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import paramiko
from fabric import Config, Connection
from invoke.exceptions import ThreadException
from paramiko.pkey import UnknownKeyType

from inventory.errors import InventoryError
from inventory.known_hosts import known_host_name, read_known_hosts
from inventory.nodes import SSH_CONFIG, Node
from inventory.transport import LINK_TIMEOUT_S, prompt_transport
from training.text.files import Frame


class LoginRefused(paramiko.AuthenticationException):
    """The reason, in words for people."""


@dataclass(frozen=True)
class OfferedKeys:
    """AuthStrategy in place of paramiko's own order, which ends at a key of the agent that paramiko does not know."""

    node: Node

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Log in with the first key that will do. Raises LoginRefused."""
        own, reason = self._own_key()
        with closing(paramiko.Agent()) as agent:
            # Of a kind that paramiko does not know (FIDO) the agent signs all the same, once somebody touches it: last.
            others = sorted(agent.get_keys(), key=lambda key: getattr(key, "inner_key", None) is None)
            for key in (*own, *others):
                vars(key).setdefault("public_blob", getattr(key, "public_blob", None))  # paramiko 4 asks all for it
                try:
                    left = transport.auth_publickey(self.node.user, key)
                except paramiko.AuthenticationException:
                    if transport.is_active():
                        continue
                    break  # sshd hangs up after MaxAuthTries
                if left:
                    raise LoginRefused(
                        f"it accepts the key and wants a second factor ({', '.join(left)}), which no command can give: "
                        f"let {self.node.user} in by key alone (AuthenticationMethods in its sshd_config)"
                    )
                return []
        raise LoginRefused(reason)

    def _own_key(self) -> tuple[Sequence[paramiko.PKey], str]:
        """The settings' key where it can be used from here, and what is to be said where no key will do."""
        path, user = self.node.key, self.node.user
        add = f"add it to your agent: ssh-add {shlex.quote(str(path))}"
        try:
            with _READING:
                changed = (each.stat().st_mtime_ns for each in (path, Path(f"{path}-cert.pub")) if each.exists())
                key = _key_of(path, *changed)
            return [key], f"it refuses the key {path} for user {user}; [ssh] key says which"
        except (paramiko.PasswordRequiredException, TypeError):  # cryptography's own word for it, which comes through
            return [], f"the key {path} has a passphrase; {add}"
        except UnknownKeyType as error:
            return [], f"only an agent can use keys like {path} ({error.key_type}, a security key?); {add}"
        except FileNotFoundError:
            raise
        except (paramiko.SSHException, OSError, ValueError) as error:
            return [], f"the key {path} cannot be read: {error}"


_READING = threading.Lock()


@cache
def _key_of(path: Path, *_changed_ns: int) -> paramiko.PKey:
    """Read once for all connections, with its certificate: to check an RSA key takes a quarter of a second."""
    return paramiko.PKey.from_path(path)


# What ends one of its threads, paramiko logs with a traceback besides raising it; without a handler that is stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

Answer = TypeVar("Answer")
CONNECT_TIMEOUT_S = 10
RUN_TIMEOUT_S = 600
ASK_TIMEOUT_S = 60
PROHIBITED, CONNECT_FAILED = 1, 2
"""Why a channel is not opened (RFC 4254, 5.1); a session gets the second one beyond MaxSessions."""
MAX_ANSWER = 64 << 20
"""Characters that a command may print; whoever prints more is cut off."""


class SshError(InventoryError, RuntimeError):
    """A node could not be reached or refused us; the message names it and the reason."""

    mend = ""
    """What to do, where that is the same for all of its kind."""


class HostKeyError(SshError):
    """It shows no host key that we know it by."""

    mend = "fab trust"


class LoginError(SshError):
    """It lets us in with none of our keys."""

    mend = (
        'name the right key in cluster.toml: [ssh] key = "...", or key in the [[nodes]] of one machine; '
        "or put this one there: ssh-copy-id"
    )


class _ThroughJumpHost(Connection):
    def close(self) -> None:
        """Both connections."""
        super().close()
        self.gateway.close()


def connect(node: Node, timeout_s: int = CONNECT_TIMEOUT_S) -> Connection:
    """An open connection to a node, to be used in a `with`. Raises SshError naming the node and what to do."""
    config = Config(overrides={"load_ssh_configs": False})  # what is wanted of it is in the node already
    where = {"host": node.address, "user": node.user, "port": node.port, "connect_timeout": timeout_s, "config": config}
    where["connect_kwargs"] = {
        "auth_strategy": OfferedKeys(node),
        "transport_factory": prompt_transport,
        "banner_timeout": timeout_s,
        "auth_timeout": timeout_s,
    }
    if node.through:
        connection: Connection = _ThroughJumpHost(**where, gateway=connect(node.through, timeout_s))
    else:
        connection = Connection(**where)
    note = ""
    try:
        known = read_known_hosts(node.known_hosts)
        note = f" ({known.note})" if known.note else ""
        connection.client.get_host_keys().update(known.keys_of(known_host_name(node.address, node.port)))
        connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
        connection.open()
    except Exception as error:
        connection.close()
        raise _refusal(node, error, note) from error
    return connection


def shown_key(node: Node, gateway: Node) -> Sequence[paramiko.PKey]:
    """The host key that a node shows behind its jump host, where ssh-keyscan cannot ask; none where it shows none."""
    with connect(gateway) as way, suppress(paramiko.SSHException, OSError, EOFError):
        place = (node.address, node.port)
        channel = way.transport.open_channel("direct-tcpip", place, ("", 0), timeout=LINK_TIMEOUT_S)
        with paramiko.Transport(channel) as transport:
            transport.start_client(timeout=CONNECT_TIMEOUT_S)
            return [transport.get_remote_server_key()]
    return []


def _refusal(node: Node, error: Exception, note: str) -> SshError:
    """The error in words, of the kind that says what to do. `note`: on lines of known_hosts, for an unknown host."""
    message = str(error).removeprefix("[Errno None] ")  # as paramiko begins where each address refused
    kind, reason = SshError, f"cannot be reached: {message or type(error).__name__}"
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(error, LoginRefused):
        kind, reason = LoginError, message
    elif missing:
        reason = f"no such file: {missing}"
    elif isinstance(error, paramiko.BadHostKeyException):
        kind, reason = HostKeyError, f"its host key is not the one in {node.known_hosts}; rebuilt?"
    elif isinstance(error, paramiko.SSHException) and "not found in known_hosts" in message:  # paramiko's words
        kind = HostKeyError
        reason = f"its host key is not in {node.known_hosts}"
    elif isinstance(error, socket.gaierror):
        reason = f"{node.address} is neither a name that resolves nor a Host of {SSH_CONFIG}: {error.strerror}"
    where = f"{node.name} ({node.address}:{node.port})"
    if kind is not HostKeyError:
        return kind(f"{where}: {reason}")
    mend, does = "fab trust", "shows the fingerprint and adds it"
    if node.machine_id:
        mend, does = "fab up", "brings it over the cloud's own channel"
    unknown = HostKeyError(f"{where}: {reason}; `{mend}` {does}{note}")
    unknown.mend = mend
    return unknown


def run(connection: Connection, command: str, *, timeout_s: float = RUN_TIMEOUT_S) -> str:
    """Run a shell command as root on the node and return its stdout.

    Raises SshError with the command's last words when it fails; and when it has not ended after `timeout_s`, which
    gives the connection up too.
    """
    return run_greeted(connection, command, timeout_s=timeout_s)[0]


def run_greeted(connection: Connection, command: str, *, timeout_s: float = RUN_TIMEOUT_S) -> tuple[str, str]:
    """The same, with the first line that the node's shell printed by itself; empty where it is silent."""
    frame = Frame()
    line = root_line(connection, frame.around(command))
    result = _within(timeout_s, connection, line, textwrap.shorten(command, 60, placeholder=" ..."))
    answer, greeting = frame.split(result.stdout)
    if result.failed:
        words = (result.stderr or answer or greeting).strip().splitlines()
        raise SshError(
            f"{connection.host}: {command.split(maxsplit=1)[0]} ended with {result.exited}: "
            f"{words[-1] if words else 'no message'}"
        )
    if answer is None:
        raise SshError(f"{connection.host}: its shell runs no commands; it prints {greeting!r}")
    return answer, greeting


def root_line(connection: Connection, command: str) -> str:
    """The command line that runs a shell command as root, whatever shell the user has."""
    return f"{'' if connection.user == 'root' else 'sudo -n '}sh -c {shlex.quote(command)}"


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
        reason = channel_error(error) or reason
    finally:
        timer.cancel()
    raise SshError(f"{connection.host}: `{command}`: {given_up[0] if given_up else reason}")


def channel_error(error: Exception) -> str:
    """What keeps a channel from being opened or used, for people; may be empty."""
    if isinstance(error, paramiko.ChannelException) and error.code == CONNECT_FAILED:
        return "its sshd opens no more sessions at a time (MaxSessions in its sshd_config)"
    return str(error)


@contextmanager
def tunnel(node: Node, port: int) -> Iterator[int]:
    """Inside the `with`, the port of this machine's 127.0.0.1 that leads to a port of the node's own: the same
    number where it is free here."""
    with connect(node) as connection, forwarded(connection, port, port) as local_port:
        yield local_port


@contextmanager
def forwarded(connection: Connection, port: int, wanted: int) -> Iterator[int]:
    """The same over a connection that is open; the port here is `wanted` where that is free. Raises SshError where its
    sshd forwards nothing."""
    try:  # a port where nobody listens
        connection.transport.open_channel("direct-tcpip", ("127.0.0.1", 1), ("127.0.0.1", 0), timeout=LINK_TIMEOUT_S)
    except paramiko.ChannelException as error:
        if error.code == PROHIBITED:
            allow = "set AllowTcpForwarding yes in its sshd_config (DisableForwarding and PermitOpen forbid it too)"
            raise SshError(f"{connection.host}: its sshd forwards no ports: {allow}") from None
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
