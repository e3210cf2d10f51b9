"""/etc/hosts as it should read: one managed block with the cluster's private addresses. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.managed_block import outside, with_block


def rewrite(text: str, own_name: str, addresses: Mapping[str, str]) -> str:
    """The file with exactly one line a node.

    `addresses` maps node name to private address. Lines elsewhere lose the cluster's names (stale addresses,
    `127.0.1.1 te1`), because the first match in the file wins and a node's own name must not be loopback.
    """
    ours = {own_name, *addresses}
    kept = [line for line in (_without(line, ours) for line in outside(text)) if line is not None]
    return with_block(kept, [f"{address} {name}" for name, address in addresses.items()])


def _without(line: str, names: set[str]) -> str | None:
    """The line without those names; None when no name is left. Untouched when it holds none of them."""
    entry, mark, comment = line.partition("#")
    address, *rest = entry.split() or [""]
    if not names.intersection(rest):
        return None if address == "127.0.1.1" else line
    left = [name for name in rest if name not in names]
    if not left or address == "127.0.1.1":
        return None
    return " ".join([address, *left]) + (f" {mark}{comment}" if mark else "")


def written_by_cloud_init(text: str) -> bool:
    """Whether cloud-init writes this file at every boot; the header of its template says so.

    Vendor data may ask for that, and vendor data outweighs /etc/cloud/cloud.cfg.d: the template needs the block.
    """
    return "manage_etc_hosts" in text
