"""How an ssh connection sends, and when it ends by itself."""

from __future__ import annotations

import socket
from typing import Any

import paramiko

ALIVE_S, LINK_TIMEOUT_S = 5, 30
"""So often a node is asked for a sign of life; one that acknowledges nothing for so long is gone, whatever the command
on it was given."""


def prompt_transport(sock: Any, **options: Any) -> paramiko.Transport:
    """A paramiko.Transport that ends by itself once the node is gone: paramiko would wait for its answer for ever. And
    it does not wait for the node's acknowledgement (Nagle's algorithm) before it sends the next few bytes, which would
    cost 40 ms a command. OpenSSH and Fabric's tunnels do the same."""
    if isinstance(sock, socket.socket):  # not a channel of a jump host: there the commands' own limits end the wait
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux alone
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_TIMEOUT_S * 1000)
    transport: Any = paramiko.Transport(sock, **options)
    transport.set_keepalive(ALIVE_S)
    transport.channel_timeout = LINK_TIMEOUT_S
    return transport
