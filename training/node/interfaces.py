"""Which network interfaces a process's connections really use."""

from __future__ import annotations

import socket
from collections import Counter

import psutil


def interfaces_in_use() -> dict[str, int]:
    """Interface -> number of this process's established TCP connections, from the busiest on."""
    names = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }
    local = [
        connection.laddr.ip.removeprefix("::ffff:")  # how an IPv4 address shows on an IPv6 socket
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED
    ]
    return dict(Counter(names.get(address, address) for address in local).most_common())
