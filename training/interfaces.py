"""Which network interfaces a process's connections really use, read from /proc."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections import Counter
from pathlib import Path

_SIOCGIFADDR = 0x8915
_ESTABLISHED = "01"
_SOCKET = re.compile(r"^socket:\[(\d+)\]$")


def parse_connections(table: str, inodes: set[str]) -> list[str]:
    """Local addresses of the established connections in a /proc/net/tcp or tcp6 text, one an inode wanted.

    Addresses stand there as hexadecimal 32-bit words in host byte order; tcp6 shows IPv4 as ::ffff:a.b.c.d.
    """
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[3] == _ESTABLISHED and fields[9] in inodes:
            word = fields[1].split(":")[0][-8:]
            found.append(socket.inet_ntoa(struct.pack("=I", int(word, 16))))
    return found


def interface_addresses() -> dict[str, str]:
    """IPv4 address -> interface name on this machine."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # no IPv4 address on it
                continue
            addresses[socket.inet_ntoa(answer[20:24])] = name
    return addresses


def interfaces_in_use() -> dict[str, int]:
    """Interface -> number of this process's established TCP connections, from the busiest on."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            match = _SOCKET.match(str(entry.readlink()))
        except FileNotFoundError:  # the listing's own descriptor
            continue
        if match:
            inodes.add(match[1])
    names = interface_addresses()
    local = [
        address
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6")
        if Path(table).exists()
        for address in parse_connections(Path(table).read_text(encoding="ascii"), inodes)
    ]
    return dict(Counter(names.get(address, address) for address in local).most_common())
