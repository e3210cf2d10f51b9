"""What the nodes of a run have: asked of all at once through the head, which reaches them as the launcher does."""

from __future__ import annotations

import shlex
from dataclasses import replace
from math import inf

from training.bounded import figure_in
from training.laptop.head_node import Head
from training.launch import Launch
from training.plan.facts import Card, NodeHardware, slowest_first

QUERY = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null"
CARDS = f'cards=$({QUERY}) && echo "$cards" | sed s/^/card=/'
"""Nothing where it fails, whatever it says then."""
RAM = "{ awk '/^MemTotal:/ {print $2}' /proc/meminfo || echo $(($(sysctl -n hw.memsize) / 1024)); } 2>/dev/null"
ASK = f"{{ {CARDS}; printf ram=; {RAM}; }}"
"""A line for each card, then the KiB of RAM."""
REACH = "timeout 20 ssh -n -o BatchMode=yes -o ConnectTimeout=5"
NODES_S = 30.0
SEPARATOR = "\x1e"


DISK = "df -Pk {disk} 2>/dev/null | awk 'END {{print \"disk=\" $4}}'; "
"""KiB that are free where runs lie."""


def of_nodes(head: Head, launch: Launch) -> tuple[NodeHardware, ...]:
    """In rank order. A node that does not say is taken for one like the head: the start will name it. Raises HeadError.

    Where the ranks compute on the CPU no node has cards, whatever it has.
    """
    first, *others = launch.hosts
    ask = DISK.format(disk=shlex.quote(launch.data_disk)) * bool(launch.data_disk) + ASK
    asks = {first.name: f"sh -c {shlex.quote(ask)}"}
    asks |= {host.name: f"{REACH} {shlex.quote(host.name)} {shlex.quote(ask)}" for host in others}
    said = head.shell(" ".join(_block(name, ask) for name, ask in asks.items()) + " wait", NODES_S)
    blocks = [block.partition("\n") for block in said.split(SEPARATOR)[1:]]
    found = {name: _hardware(name, content) for name, _, content in blocks}
    its = found.get(first.name) or NodeHardware(first.name, 1, (), inf)
    nodes = [replace(found.get(host.name) or its, name=host.name, slots=host.slots) for host in launch.hosts]
    on_cpus = launch.env.get("DS_ACCELERATOR") == "cpu"
    return tuple(replace(node, cards=()) if on_cpus else node for node in nodes)


def _block(name: str, ask: str) -> str:
    """Asks meanwhile; prints a node's answer in one piece, with its name before it."""
    return f"{{ out=$({ask} 2>/dev/null); printf '\\036%s\\n%s\\n' {shlex.quote(name)} \"$out\"; }} &"


def _hardware(name: str, content: str) -> NodeHardware | None:
    """From what a node printed; None where that is not an answer. What its shell adds is read over."""
    told: dict[str, list[str]] = {"card": [], "ram": [""], "disk": [""]}
    for key, _, value in (line.partition("=") for line in content.splitlines()):
        if key in told and value:
            told[key].append(value)
    ram, free = figure_in(told["ram"][-1]) * 1024.0, told["disk"][-1]
    disk_free = figure_in(free) * 1024.0 if free else inf
    return NodeHardware(name, 1, tuple(map(_card, told["card"])), ram, disk_free) if ram else None


def _card(line: str) -> Card:
    name, _, mib = line.rpartition(",")
    return Card(name.strip(), figure_in(mib) * 2**20 or inf)


def with_slowest_first(launch: Launch, nodes: tuple[NodeHardware, ...]) -> tuple[Launch, tuple[NodeHardware, ...]]:
    """The launch with nodes of different cards in the order that suits the stages of a model; the head stays first."""
    ordered = slowest_first(nodes)
    hosts = {host.name: host for host in launch.hosts}
    return replace(launch, hosts=tuple(hosts[node.name] for node in ordered)), ordered
