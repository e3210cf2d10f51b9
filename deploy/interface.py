"""The network interface training talks over, and why it is that one. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass


class InterfaceError(ValueError):
    """No interface carries the node's private address; the message names what there is."""


@dataclass(frozen=True)
class Interface:
    """An interface's exact name and the sentence that says why."""

    name: str
    reason: str


def choose_interface(addresses_json: str, route_json: str, private_address: str, head_address: str) -> Interface:
    """Pick from `ip -j address` and `ip -j route get HEAD` ("[]" where there is no route).

    The interface that holds the node's private address is the one; the route to the head must agree with it,
    except on the head itself, whose route to its own address is loopback. Raises InterfaceError.
    """
    holders = {
        info["local"]: link["ifname"] for link in json.loads(addresses_json) for info in link.get("addr_info", [])
    }
    name = holders.get(private_address)
    if name is None:
        raise InterfaceError(
            f"no interface has the private address {private_address}; this node has "
            + ", ".join(f"{address} on {link}" for address, link in holders.items())
            + "; correct private_address in cluster.toml"
        )
    if private_address == head_address:
        return Interface(name, f"{name} holds {private_address}, the head's own address")
    routed = next((route["dev"] for route in json.loads(route_json) if "dev" in route), None)
    if routed is None:
        raise InterfaceError(
            f"there is no route from {private_address} on {name} to the head {head_address}; "
            "use private addresses of one network in cluster.toml"
        )
    if routed != name:
        raise InterfaceError(
            f"the route to the head {head_address} leaves by {routed}, but {private_address} is on {name}; "
            "use private addresses of one network in cluster.toml"
        )
    return Interface(name, f"the route to the head {head_address} leaves by {name}, which holds {private_address}")


def nccl_conf(interface: Interface) -> str:
    """/etc/nccl.conf. `==` is NCCL's exact match: one `=` for the file's syntax, one for "not a prefix"."""
    return f"# {interface.reason}\nNCCL_SOCKET_IFNAME=={interface.name}\n"
