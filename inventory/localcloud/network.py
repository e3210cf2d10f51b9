"""The hosts' network: a bridge, an address on it as their gateway, and masquerade to the world."""

from __future__ import annotations

import json
from ipaddress import IPv4Network, ip_address
from pathlib import Path
from typing import Any

from inventory.localcloud.commands import LocalCloudError, run
from inventory.localcloud.places import PREFIX, Places

FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
FORWARDING_BEFORE = Path("/run/spotune/ip_forward")
"""What forwarding was before the first cloud of ours; gone with a reboot, as the setting is."""
INTERFACES = Path("/sys/class/net")
INSIDE = "host0"
"""The host's end of its cable, as systemd-nspawn names it."""
IFF_UP = 1
SMALLEST_PREFIX = 27
BURST_S = 0.01
"""A slowed link lets through at once what it carries in this time: where all cores are taken a queue is woken late by
milliseconds, and what it could not send by then would be lost to the rate."""
SMALLEST_BURST = 2 * 1514
"""Bytes: two whole Ethernet frames, or nothing would ever pass."""
QUEUE_S = 0.1
"""How long a packet waits before it is dropped: room for several senders at once to one receiver, and no more, since
what answers in the other direction waits in the same queue."""
SMALLEST_QUEUE = 16 * 1024
"""Bytes: TCP's first ten packets."""


def gateway(subnet: IPv4Network) -> str:
    """The address of our end of the bridge."""
    return str(subnet[1])


def rules(table: str, bridge: str, subnet: IPv4Network) -> str:
    """Our nft table: hosts reach the world, and TCP fits through a narrower way out than the bridge. Pure."""
    return f"""\
{no_rules(table)}
table ip {table} {{
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {subnet} ip daddr != {subnet} masquerade
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname "{bridge}" oifname != "{bridge}" tcp flags syn tcp option maxseg size set rt mtu
    oifname "{bridge}" iifname != "{bridge}" tcp flags syn tcp option maxseg size set rt mtu
  }}
}}
"""


def no_rules(table: str) -> str:
    """Without our nft table, whether it was there or not. Pure."""
    return f"table ip {table}\ndelete table ip {table}\n"


def taken_by(routes: list[dict[str, Any]], subnet: IPv4Network, bridge: str) -> str | None:
    """The interface whose network overlaps ours, from `ip -json route`. Pure."""
    for route in routes:
        if route["dst"] == "default" or route.get("dev") == bridge:
            continue
        if IPv4Network(route["dst"], strict=False).overlaps(subnet):
            return str(route.get("dev"))
    return None


def nameservers_file(resolv_conf: str) -> Path:
    """Which file lists name servers a host can reach: loopback ones are this machine's alone. Pure."""
    servers = [
        words[1] for line in resolv_conf.splitlines() if (words := line.split())[:1] == ["nameserver"] and words[1:]
    ]
    if servers and all(ip_address(server.partition("%")[0]).is_loopback for server in servers):
        return Path("/run/systemd/resolve/resolv.conf")
    return Path("/etc/resolv.conf")


def ensure_network(places: Places, subnet: IPv4Network) -> None:
    """Bridge, gateway address, forwarding and masquerade; what is there already stays."""
    if subnet.prefixlen > SMALLEST_PREFIX:
        raise LocalCloudError(f"local.subnet: {subnet} is too small; /{SMALLEST_PREFIX} or larger")
    taken = taken_by(json.loads(run("ip", "-4", "-json", "route")), subnet, places.bridge)
    if taken:
        cloud = taken.removeprefix(f"{PREFIX}-")
        whose = taken if cloud == taken else f"the local cloud of the cluster {cloud!r} (name in cluster.toml)"
        raise LocalCloudError(f"local.subnet: {subnet} overlaps the network of {whose}; choose another")
    if not (INTERFACES / places.bridge).exists():
        run("ip", "link", "add", places.bridge, "type", "bridge")
    run("ip", "address", "replace", f"{gateway(subnet)}/{subnet.prefixlen}", "dev", places.bridge)
    run("ip", "link", "set", places.bridge, "up")
    _forward()
    run("nft", "-f", "-", stdin=rules(places.table, places.bridge, subnet))


def _forward() -> None:
    before = FORWARDING.read_text().strip()
    if before != "1":
        FORWARDING_BEFORE.parent.mkdir(exist_ok=True)
        FORWARDING_BEFORE.write_text(before)
        FORWARDING.write_text("1")


def remove_network(places: Places) -> None:
    """Remove our bridge and table; the last cloud puts forwarding back as the first found it."""
    if (INTERFACES / places.bridge).exists():
        run("ip", "link", "delete", places.bridge)
    run("nft", "-f", "-", stdin=no_rules(places.table))
    if FORWARDING_BEFORE.exists() and not any(INTERFACES.glob("spt-*")):
        FORWARDING.write_text(FORWARDING_BEFORE.read_text())
        FORWARDING_BEFORE.unlink()


def set_link(link: str, state: str) -> None:
    """Take a host's cable "down" (cut) or "up" (healed)."""
    if not (INTERFACES / link).exists():
        raise LocalCloudError(f"{link} does not exist: the host is not running")
    run("ip", "link", "set", link, state)


def tbf(mbit: float) -> list[str]:
    """The token bucket of a link with such a rate, for `tc qdisc`. Pure."""
    bytes_per_s = mbit * 1e6 / 8
    burst = max(SMALLEST_BURST, round(bytes_per_s * BURST_S))
    limit = burst + max(SMALLEST_QUEUE, round(bytes_per_s * QUEUE_S))
    return ["tbf", "rate", f"{mbit * 1e6:.0f}bit", "burst", str(burst), "limit", str(limit)]


def slow(link: str, leader: int, mbit: float | None) -> None:
    """Slow a host's cable both ways, or (None) not any more: the traffic to it where its cable leaves our bridge, that
    from it where it enters the cable, in the network of the host's first process. Raises LocalCloudError."""
    for device, where in ((link, []), (INSIDE, ["nsenter", f"--target={leader}", "--net"])):
        if mbit:
            run(*where, "tc", "qdisc", "replace", "dev", device, "root", *tbf(mbit))
        elif _bucket(device, where):
            run(*where, "tc", "qdisc", "delete", "dev", device, "root")


def rate_mbit(link: str) -> float | None:
    """What a cable is slowed to; None where it is not, or not there."""
    bucket = _bucket(link, []) if (INTERFACES / link).exists() else None
    return bucket["rate"] * 8 / 1e6 if bucket else None


def _bucket(device: str, where: list[str]) -> dict[str, float] | None:
    listed = json.loads(run(*where, "tc", "-json", "qdisc", "show", "dev", device))
    return next((each["options"] for each in listed if each["kind"] == "tbf"), None)


def is_cut(link: str) -> bool:
    """Whether the cable is there and down."""
    flags = INTERFACES / link / "flags"
    return flags.exists() and not int(flags.read_text(), 16) & IFF_UP
