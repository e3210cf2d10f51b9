"""NCCL_DEBUG=INFO logs into facts: the version, the interface, the transports, what it warned of. Pure.

The forms of the lines are those of published logs of NCCL 2.4 to 2.28; the tests name them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from training.counting import many

_OURS = re.compile(r"\bNCCL (INFO|WARN) (?P<text>.*)$")
_VERSION = re.compile(r"\bNCCL version (?P<version>\d+\.\d+\.\d+)\S*")
_BOOTSTRAP = re.compile(r"^Bootstrap ?:.*? (?:\[\d+\])?(?P<interface>[\w.@-]+):")
_DEVICE = re.compile(r"\[\d+\](?P<device>[\w.-]+):[^\s;\[]*")
_NETWORK = re.compile(r"^Using network (?P<network>.+)$")
_CHANNEL = re.compile(r"^Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\].*? via (?P<via>\S+)")
_PLUGIN = re.compile(r"^(?:NET/Plugin: Loaded net plugin|P2P plugin|NET/OFI (?:Using|Initializing)) (?P<name>[^(,]+)")
_SIZE = re.compile(r"\brank (?P<rank>\d+) nranks (?P<size>\d+)\b")
_SETTING = re.compile(r"^(?P<key>NCCL_\w+) set by environment to (?P<value>.+?)\.?$")


@dataclass
class NcclFacts:
    """What the log of one rank, or of several together, tells."""

    version: str = ""
    bootstrap: set[str] = field(default_factory=set)
    """Interfaces the ranks met over."""
    devices: set[str] = field(default_factory=set)
    """Interfaces or RDMA devices the data go over."""
    network: set[str] = field(default_factory=set)
    """Socket, IB, or a plugin's name."""
    plugin: str = ""
    transports: Counter[str] = field(default_factory=Counter)
    """Connections by kind: NET/Socket, NET/IB, NET/IB/GDRDMA, P2P, SHM."""
    world_size: int = 0
    settings: dict[str, str] = field(default_factory=dict)
    """NCCL_* variables it found."""
    warnings: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        """One line of a log; anything but NCCL's own is passed over."""
        if match := _VERSION.search(line):
            self.version = match["version"]
        ours = _OURS.search(line)
        if ours is None:
            return
        text = ours["text"].strip()
        if ours[1] == "WARN":
            if text not in self.warnings:
                self.warnings.append(text)
            return
        self._take_info(text)

    def _take_info(self, text: str) -> None:
        if match := _BOOTSTRAP.match(text):
            self.bootstrap.add(match["interface"])
        elif match := _CHANNEL.match(text):
            self.transports[transport_kind(match["via"])] += 1
        elif text.startswith(("NET/Socket : Using", "NET/IB : Using")):
            self.devices.update(found["device"] for found in _DEVICE.finditer(text))
        elif match := _NETWORK.match(text):
            self.network.add(match["network"].strip())
        elif match := _PLUGIN.match(text):
            self.plugin = match["name"].strip()
        elif match := _SETTING.match(text):
            self.settings[match["key"]] = match["value"]
        elif match := _SIZE.search(text):
            self.world_size = max(self.world_size, int(match["size"]))


def transport_kind(via: str) -> str:
    """NET/Socket of `NET/Socket/0`, NET/IB/GDRDMA of `NET/IB/3/GDRDMA`, P2P of `P2P/CUMEM`, SHM of `SHM/direct`."""
    head, *rest = via.split("/")
    if head != "NET" or not rest:
        return head
    direct = "/GDRDMA" if "GDRDMA" in rest else ""
    return f"NET/{rest[0]}{direct}"


def read_log(lines: Iterable[str]) -> NcclFacts:
    """The facts of a log."""
    facts = NcclFacts()
    for line in lines:
        facts.take(line)
    return facts


def fact_lines(facts: NcclFacts) -> list[str]:
    """The facts in words, one line each; the first says where there are none."""
    if not (facts.version or facts.transports or facts.bootstrap):
        return ["no word of NCCL in the log; it speaks with NCCL_DEBUG=INFO in the ranks' environment"]
    lines = [f"NCCL {facts.version or 'of unknown version'}{_ranks(facts)}"]
    if facts.bootstrap:
        lines.append(f"meets over {', '.join(sorted(facts.bootstrap))}")
    if facts.network or facts.devices:
        over = ", ".join(sorted(facts.devices)) or "devices it does not name"
        lines.append(f"network {', '.join(sorted(facts.network)) or 'unknown'} over {over}{_plugin(facts)}")
    if facts.transports:
        lines.append("connections: " + ", ".join(f"{count} {kind}" for kind, count in facts.transports.most_common()))
    lines += [f"{key}={value}" for key, value in sorted(facts.settings.items())]
    return [*lines, *(f"warning: {text}" for text in facts.warnings), *suspicions(facts)]


def _ranks(facts: NcclFacts) -> str:
    return f", {many(facts.world_size, 'rank')}" if facts.world_size else ""


def _plugin(facts: NcclFacts) -> str:
    return f", plugin {facts.plugin}" if facts.plugin else ""


def suspicions(facts: NcclFacts) -> Sequence[str]:
    """What is probably not meant, one sentence each."""
    found = []
    if facts.devices & {"lo"} and facts.world_size > 1 and any(kind.startswith("NET") for kind in facts.transports):
        found.append("the data go over lo: only ranks of one node can talk; set NCCL_SOCKET_IFNAME")
    virtual = sorted(device for device in facts.devices if re.match(r"(docker|virbr|veth|br-)", device))
    if virtual:
        found.append(f"{', '.join(virtual)} is a virtual bridge's interface, which no other node sees")
    return found
