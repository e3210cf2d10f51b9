"""The record of a cloud's hosts: who they are, not whether they run (that is asked of the machine)."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path

from inventory.localcloud.commands import LocalCloudError

FIRST_ADDRESS = 10
"""Offset in the subnet of the first host; the gateway has offset 1."""


@dataclass(frozen=True)
class Host:
    """One host. Name and rank stay when it is made anew; everything else is the machine's own."""

    name: str
    rank: int
    instance_id: str
    address: str
    disk_id: str

    @property
    def hostname(self) -> str:
        """What the machine calls itself before anyone configures it, in the cloud's form: iZ<id>Z."""
        return f"iZ{self.instance_id.removeprefix('i-')}Z"

    @property
    def disk_serial(self) -> str:
        """As in /dev/disk/by-id/virtio-<serial>: the disk's id without "d-", 20 characters."""
        return self.disk_id.removeprefix("d-")


@dataclass(frozen=True)
class Record:
    """All hosts in rank order, and the last address given out: an address is never used twice."""

    hosts: tuple[Host, ...] = ()
    last_offset: int = FIRST_ADDRESS - 1

    def host(self, name: str) -> Host:
        """The host of this name. Raises LocalCloudError naming those there are."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts) or "none"
        raise LocalCloudError(f"there is no host {name!r}; there is: {known}")


def grown(record: Record, count: int, subnet: IPv4Network) -> Record:
    """The record with new hosts up to `count`."""
    while len(record.hosts) < count:
        rank = len(record.hosts)
        address, record = _next_address(record, subnet)
        host = Host(f"te{rank + 1}", rank, _new_id("i-"), address, _new_id("d-"))
        record = replace(record, hosts=(*record.hosts, host))
    return record


def renewed(record: Record, name: str, subnet: IPv4Network, fresh_disk: bool) -> Record:
    """The record with one host replaced by a new machine of the same name and rank at another address."""
    old = record.host(name)
    address, record = _next_address(record, subnet)
    disk_id = _new_id("d-") if fresh_disk else old.disk_id
    new = replace(old, instance_id=_new_id("i-"), address=address, disk_id=disk_id)
    return replace(record, hosts=tuple(new if host.name == name else host for host in record.hosts))


def _next_address(record: Record, subnet: IPv4Network) -> tuple[str, Record]:
    offset = record.last_offset + 1
    if offset >= subnet.num_addresses - 1:
        raise LocalCloudError(f"local.subnet: {subnet} has no address left; `fab local.down`, or a larger one")
    return str(subnet[offset]), replace(record, last_offset=offset)


def _new_id(prefix: str) -> str:
    letters = string.ascii_lowercase + string.digits
    return f"{prefix}spt{''.join(secrets.choice(letters) for _ in range(17))}"


def load(path: Path) -> Record | None:
    """The record, or None where there is none. Raises LocalCloudError where it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Record(tuple(Host(**host) for host in content["hosts"]), content["last_offset"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LocalCloudError(f"{path} is damaged ({error}); `fab local.down` clears up") from None


def save(path: Path, record: Record) -> None:
    """Write the record in one piece."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    half.replace(path)


def known_hosts_text(keys: Sequence[tuple[str, str]]) -> str:
    """known_hosts lines from (address, public key file's text)."""
    return "".join(f"{address} {' '.join(line.split()[:2])}\n" for address, text in keys for line in text.splitlines())
