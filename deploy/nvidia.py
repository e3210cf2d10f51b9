"""The NVIDIA driver of a node: installed, loaded, kept at its version, with its daemons."""

from __future__ import annotations

import logging

from pyinfra import host, logger
from pyinfra.api import FactBase, deploy
from pyinfra.operations import server

from deploy.driver_facts import (
    BLACKLIST_FILE,
    LIST_PCI,
    DriverFacts,
    PciDevice,
    inspect_command,
    parse_facts,
    parse_pci,
)
from deploy.driver_plan import plan_driver
from deploy.node_files import refuse
from deploy.node_operation import Commands, known, node_operation
from deploy.packages import install_commands

BLACKLIST = "blacklist nouveau\noptions nouveau modeset=0\n"


class NvidiaPciDevices(FactBase[tuple[PciDevice, ...]]):
    """NVIDIA's devices on the PCI bus; needs no driver and no lspci."""

    default = tuple

    command = staticmethod(lambda: LIST_PCI)
    process = staticmethod(parse_pci)


class NvidiaDriver(FactBase[DriverFacts]):
    """Everything the driver's plan depends on."""

    default = DriverFacts

    command = staticmethod(inspect_command)
    process = staticmethod(parse_facts)


@node_operation
def driver_packages(branch: int) -> Commands:
    """The driver is installed from the distribution's packages, unless an adequate one is loaded.

    branch: of the driver, such as 580
    """
    facts = known(NvidiaDriver, branch=branch)
    plan = plan_driver(facts, branch)
    if plan.verdict == "refuse":
        yield refuse(f"{host.name}: NVIDIA driver: {plan.reason}")
        return
    if not plan.install:
        host.noop(plan.reason)
    else:
        logger.info(f"{host.print_prefix}{plan.reason}")
        if held := sorted(facts.held & facts.installed.keys()):
            yield f"apt-mark unhold {' '.join(held)}"
        yield from install_commands(plan.install, refresh="true")
    if plan.blacklist_nouveau:
        yield f"printf %s '{BLACKLIST}' > {BLACKLIST_FILE} && update-initramfs -u"


@node_operation
def driver_held(branch: int) -> Commands:
    """No upgrade moves the driver's packages away from under the loaded module."""
    packages = plan_driver(known(NvidiaDriver, branch=branch), branch).hold
    if packages:
        yield f"apt-mark hold {' '.join(packages)}"


@node_operation
def driver_loaded(branch: int, may_reboot: bool) -> Commands:
    """The installed driver is the loaded one.

    may_reboot: whether the node may be rebooted where another driver is in the kernel
    """
    facts = known(NvidiaDriver, branch=branch)
    plan = plan_driver(facts, branch)
    if plan.loading == "modprobe":
        yield "modprobe nvidia"
    if plan.loading != "reboot":
        return
    why = f"{host.name}: NVIDIA driver: {plan.reason}; it needs a reboot"
    if not may_reboot:
        yield refuse(f"{why}, and cluster.toml says driver.reboot = false: reboot it and deploy again")
    elif facts.gpu_users:
        yield refuse(f"{why}, but its GPU is in use by {', '.join(facts.gpu_users)}: end that first")
    else:
        # paramiko prints a traceback for each try while the node is down
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)
        yield from server.reboot._inner(delay=60, interval=5, reboot_timeout=900)


@node_operation
def driver_serving(branch: int) -> Commands:
    """The driver answers, and the persistence daemon and the fabric manager run where they are wanted."""
    plan = plan_driver(known(NvidiaDriver, branch=branch), branch)
    for service in plan.services:
        yield f"systemctl enable --now {service}.service"
    if plan.loading != "nothing" or plan.services:
        yield "nvidia-smi -L"


@deploy("NVIDIA driver")
def install_driver() -> None:
    """A driver that runs CUDA 13 on every node with a GPU; the others say that they have none."""
    # The PCI bus does not change during a deploy, so the branch may be in Python.
    if not any(device.is_gpu for device in host.get_fact(NvidiaPciDevices)):
        logger.info(f"{host.print_prefix}no NVIDIA GPU: driver skipped")
        return
    settings = host.data.settings.driver
    driver_packages(name="Packages", branch=settings.branch)
    driver_held(name="Held at their version", branch=settings.branch)
    driver_loaded(name="Loaded", branch=settings.branch, may_reboot=settings.reboot)
    driver_serving(name="Daemons", branch=settings.branch)
