"""What is known of a node's GPUs and driver before anything changes: the question, and its parsed answer. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.node_files import shell

NVIDIA, MELLANOX = "0x10de", "0x15b3"
DAEMONS = ("nvidia-persiste", "nv-fabricmanage", "nv-hostengine")
"""NVIDIA's own, by the 15 characters that comm holds."""
BLACKLIST_FILE = "/etc/modprobe.d/blacklist-nouveau.conf"
LIST_PCI = shell("list_pci.sh") + "list_pci\n"


def inspect_command(branch: int) -> str:
    """Shell that prints what `parse_facts` reads, for a driver of this branch. It changes nothing."""
    flavours = ("-open", "")
    names = (  # every package a plan may name, to ask apt which of them it has
        *(f"linux-modules-nvidia-{branch}-server{f}-KERNEL" for f in flavours),
        *(f"nvidia-dkms-{branch}-server{f}" for f in flavours),
        *(f"nvidia-headless-no-dkms-{branch}-server{f}" for f in flavours),
        f"nvidia-utils-{branch}-server",
        f"nvidia-compute-utils-{branch}-server",
        f"nvidia-fabricmanager-{branch}",
        "nvlsm",
        "linux-headers-KERNEL",
        "nvidia-driver",
    )
    return shell("list_pci.sh", "look_at_driver.sh", packages=" ".join(names), blacklist=BLACKLIST_FILE)


@dataclass(frozen=True)
class PciDevice:
    """One PCI device of NVIDIA's, as sysfs names it: 0x10de, 0x030200, 0x2236."""

    vendor: str
    class_code: str
    device: str

    @property
    def is_gpu(self) -> bool:
        """A VGA (0x0300) or 3D controller (0x0302)."""
        return self.vendor == NVIDIA and self.class_code.startswith(("0x0300", "0x0302"))

    @property
    def is_nvswitch(self) -> bool:
        """A bridge of NVIDIA's, or what manages switches of its own: the GPUs of this machine need a fabric manager."""
        return self.vendor == MELLANOX or (self.vendor == NVIDIA and self.class_code.startswith("0x0680"))

    @property
    def has_gsp(self) -> bool:
        """Turing (TU102 = 0x1e02) or newer: what NVIDIA's open kernel modules support."""
        return int(self.device, 16) >= 0x1E00


@dataclass(frozen=True)
class Unit:
    """A systemd service that is installed."""

    active: bool
    enabled: bool


@dataclass(frozen=True)
class DriverFacts:
    """Everything the driver's plan depends on."""

    pci: tuple[PciDevice, ...] = ()
    distribution: str = ""
    release: str = ""
    kernel: str = ""
    loaded: str = ""
    """Version of the module in the kernel; empty where none is loaded."""
    module: str = ""
    """Version of the module that modprobe would load for this kernel."""
    installed: Mapping[str, str] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    available: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Versions apt offers of the packages a plan may name, newest first."""
    foreign_sources: tuple[str, ...] = ()
    run_file: bool = False
    secure_boot: bool = False
    nouveau: bool = False
    nouveau_blacklisted: bool = False
    gpu_users: tuple[str, ...] = ()
    """Processes that hold a GPU, as "PID name"; without NVIDIA's own daemons."""
    units: Mapping[str, Unit] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[PciDevice, ...]:
        """The GPUs on the PCI bus, with or without a driver."""
        return tuple(device for device in self.pci if device.is_gpu)


def parse_pci(lines: Iterable[str]) -> tuple[PciDevice, ...]:
    """What LIST_PCI printed."""
    return tuple(PciDevice(*line.split()) for line in lines if len(line.split()) == 3)


def parse_loaded(text: str) -> str:
    """The version in /proc/driver/nvidia/version; empty where there is none.

    Both modules write it, "Kernel Module  535.183.01" and "Open Kernel Module for x86_64  580.95.05".
    """
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def parse_facts(lines: Iterable[str]) -> DriverFacts:
    """What `inspect_command` printed."""
    parts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines:
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            current = parts.setdefault(heading[1], [])
        else:
            current.append(line)
    system = [(key, value) for key, _, value in (line.partition("=") for line in parts["system"])]
    one = dict(system)
    return DriverFacts(
        pci=parse_pci(parts["pci"]),
        distribution=one.get("distribution", ""),
        release=one.get("release", ""),
        kernel=one.get("kernel", ""),
        loaded=parse_loaded("\n".join(parts["loaded"])),
        module=one.get("module", ""),
        installed=_installed(parts["installed"]),
        held=frozenset(parts["held"]),
        available=_available(parts["available"]),
        foreign_sources=_foreign(parts["sources"]),
        run_file=one.get("run_file") == "yes",
        secure_boot=one.get("secure_boot") == "1",
        nouveau=one.get("nouveau") == "yes",
        nouveau_blacklisted=one.get("blacklisted") == "yes",
        gpu_users=tuple(v for k, v in system if k == "gpu_user" and not v.partition(" ")[2].startswith(DAEMONS)),
        units=dict(_unit(value) for key, value in system if key == "unit"),
    )


def _installed(lines: Sequence[str]) -> dict[str, str]:
    fields = [line.split() for line in lines]
    # dpkg's second letter is the state: only "i" is installed ("rc" was removed)
    return {f[1]: f[2] for f in fields if len(f) == 3 and f[0][1:2] == "i"}


def _available(lines: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`apt-cache madison`: "name | version | source", newest first."""
    offers: dict[str, list[str]] = {}
    for line in lines:
        fields = [text.strip() for text in line.split("|")]
        if len(fields) == 3 and fields[1] not in offers.setdefault(fields[0], []):
            offers[fields[0]].append(fields[1])
    return {name: tuple(versions) for name, versions in offers.items()}


_FOREIGN = re.compile(r"(?!\S*nvidia-(?:container|docker))\S*(?:cuda|nvidia|graphics-drivers|pop-os|lambdalabs)")
"""NVIDIA's repositories, on this disk and mirrored too, and of others who build its driver; none for containers."""


def _foreign(lines: Sequence[str]) -> tuple[str, ...]:
    """Sources with drivers of another build than the distribution's: their packages replace each other's."""
    matches = (re.search(r"\b(?:https?|file|copy|cdrom):\S+", line) for line in lines)
    return tuple(dict.fromkeys(match[0] for match in matches if match and _FOREIGN.match(match[0])))


def _unit(text: str) -> tuple[str, Unit]:
    name, active, enabled = (*text.split(), "", "")[:3]
    # "static" has nothing to enable: something else starts it
    return name, Unit(active == "active", enabled in ("enabled", "static"))
