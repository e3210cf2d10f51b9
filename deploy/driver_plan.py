"""The NVIDIA driver: what a node has -> what is to be done, in order, with the reason. Pure.

Order of preference: an adequate loaded driver is left alone; the distribution's prebuilt modules, which are
signed and so work under Secure Boot; modules compiled on the node (DKMS). One source of drivers a node: where
a .run file or another repository brought one, spotune refuses rather than mixes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from deploy.driver_facts import MELLANOX, DriverFacts

MINIMUM_BRANCH = 580
"""The oldest branch that runs CUDA 13 (docs.nvidia.com/deploy/cuda-compatibility)."""

_LIBRARIES = re.compile(r"(libnvidia-compute|nvidia-utils)\b")

Verdict = Literal["keep", "install", "refuse"]
Loading = Literal["nothing", "modprobe", "reboot"]


@dataclass(frozen=True)
class DriverPlan:
    """What happens to one node, in the order of the fields."""

    verdict: Verdict
    reason: str
    install: tuple[str, ...] = ()
    blacklist_nouveau: bool = False
    hold: tuple[str, ...] = ()
    """Driver packages installed now that nothing holds at their version yet."""
    loading: Loading = "nothing"
    services: tuple[str, ...] = ()
    """Services to enable and start."""


def plan_driver(facts: DriverFacts, branch: int = MINIMUM_BRANCH) -> DriverPlan:
    """The whole decision for one node with a GPU. `branch` is what would be installed, at least MINIMUM_BRANCH."""
    will_do = facts.module and major(facts.module) >= MINIMUM_BRANCH
    if facts.loaded and major(facts.loaded) >= MINIMUM_BRANCH and (facts.module == facts.loaded or not will_do):
        if problem := _other_libraries(facts):
            return DriverPlan("refuse", problem)
        reason = f"driver {facts.loaded} is loaded, {MINIMUM_BRANCH} or newer: left alone"
        return _keep(facts, facts.loaded, DriverPlan("keep", reason))
    if will_do:  # another or none is loaded: an upgrade or a run that was interrupted
        reason = f"driver {facts.module} is installed, {facts.loaded or 'none'} is loaded"
        return _keep(
            facts,
            facts.module,
            DriverPlan("keep", reason, blacklist_nouveau=_blacklists(facts), loading=_loading(facts)),
        )
    return _install(facts, branch)


def major(version: str) -> int:
    """The branch of a driver version: 580 of 580.178.04."""
    return int(version.partition(".")[0])


def upstream(package_version: str) -> str:
    """NVIDIA's version in a package's: 580.178.04 of 580.178.04-0ubuntu0.22.04.1 or of 1:580.178.04-1."""
    return re.sub(r"^\d+:", "", package_version).partition("-")[0]


def _other_libraries(facts: DriverFacts) -> str:
    """Why no reboot brings the loaded driver to work: the module on the disk is not of the libraries' version."""
    versions = {name: upstream(version) for name, version in facts.installed.items() if _LIBRARIES.match(name)}
    if facts.run_file or facts.module != facts.loaded or not versions or facts.module in versions.values():
        return ""
    return (
        f"its libraries are {', '.join(sorted(set(versions.values())))} and its module is {facts.module}, which do not "
        f"work together: apt-mark unhold and install the module of the libraries' version for kernel {facts.kernel} "
        "(linux-modules-nvidia-... or nvidia-dkms-...), reboot, and deploy again"
    )


def _keep(facts: DriverFacts, version: str, plan: DriverPlan) -> DriverPlan:
    services = _pending(facts, "nvidia-persistenced")
    return _with_fabric(facts, version, replace(plan, hold=_unheld(facts), services=services))


def _blacklists(facts: DriverFacts) -> bool:
    return facts.nouveau and not facts.nouveau_blacklisted


def _loading(facts: DriverFacts) -> Loading:
    return "reboot" if facts.loaded or facts.nouveau else "modprobe"


def _install(facts: DriverFacts, branch: int) -> DriverPlan:
    if problem := _obstacle(facts):
        return DriverPlan("refuse", problem)
    modules, problem = _kernel_modules(facts, branch)
    if problem:
        return DriverPlan("refuse", problem)
    userland = (
        f"nvidia-headless-no-dkms-{branch}-server{_flavour(facts)}",
        f"nvidia-utils-{branch}-server",
        f"nvidia-compute-utils-{branch}-server",
    )
    offered = facts.available.get(userland[1])
    if not offered:
        return DriverPlan("refuse", _not_offered(facts, userland[1]))
    had = f"driver {facts.loaded} is loaded, older than {MINIMUM_BRANCH}" if facts.loaded else "no driver"
    return _with_fabric(
        facts,
        upstream(offered[0]),
        DriverPlan(
            "install",
            f"{had}: {modules[-1]}",
            install=(*modules, *userland),
            blacklist_nouveau=_blacklists(facts),
            loading=_loading(facts),
            services=("nvidia-persistenced",),
        ),
    )


def _obstacle(facts: DriverFacts) -> str:
    """Why no package may be installed on this node; empty where it may."""
    has = f"driver {facts.loaded}" if facts.loaded else "a driver that is not loaded"
    if facts.run_file:
        return (
            f"{has} was installed by NVIDIA's .run file, packages would break it; remove it with "
            f"nvidia-uninstall and deploy again, or install a .run of {MINIMUM_BRANCH} or newer"
        )
    if facts.foreign_sources:
        return (
            f"apt has another source of drivers ({facts.foreign_sources[0]}), the two replace each other's "
            f"files; install {MINIMUM_BRANCH} or newer from there, or remove that source and its driver and "
            "deploy again"
        )
    if facts.distribution != "ubuntu":
        offered = facts.available.get("nvidia-driver")
        has_own = f"its own driver is {upstream(offered[0])}" if offered else "apt offers none"
        return (
            f"{facts.distribution} {facts.release} has no driver {MINIMUM_BRANCH} or newer ({has_own}), "
            "which CUDA 13 needs; take an image with such a driver, or Ubuntu 22.04 or 24.04"
        )
    return ""


def _flavour(facts: DriverFacts) -> str:
    """NVIDIA recommends the open modules from Turing on, newer GPUs need them, older ones cannot use them."""
    return "-open" if all(gpu.has_gsp for gpu in facts.gpus) else ""


def _kernel_modules(facts: DriverFacts, branch: int) -> tuple[tuple[str, ...], str]:
    """(packages, "") or ((), why not)."""
    flavour = _flavour(facts)
    prebuilt = f"linux-modules-nvidia-{branch}-server{flavour}-{facts.kernel}"
    if prebuilt in facts.available:
        return (prebuilt,), ""
    dkms, headers = f"nvidia-dkms-{branch}-server{flavour}", f"linux-headers-{facts.kernel}"
    if dkms not in facts.available:
        return (), _not_offered(facts, dkms)
    if facts.secure_boot:
        return (), (
            f"Secure Boot is on and there is no signed module for kernel {facts.kernel} ({prebuilt}); boot a "
            "kernel that has one (linux-image-generic), or turn Secure Boot off"
        )
    if headers not in facts.available and headers not in facts.installed:
        return (), (
            f"there is neither {prebuilt} nor {headers} to compile one; boot a kernel of the distribution's "
            "(linux-image-generic)"
        )
    return (headers, dkms), ""


def _not_offered(facts: DriverFacts, package: str) -> str:
    return (
        f"apt on {facts.distribution} {facts.release} offers no {package}; are the components restricted and "
        "multiverse enabled, and the package lists fresh (apt-get update)?"
    )


def _with_fabric(facts: DriverFacts, version: str, plan: DriverPlan) -> DriverPlan:
    """The plan with a fabric manager of exactly the driver's version, where an NVSwitch is."""
    if not any(device.is_nvswitch for device in facts.pci):  # as on HGX boards
        return plan
    package = f"nvidia-fabricmanager-{major(version)}"
    services = tuple(dict.fromkeys((*plan.services, *_pending(facts, "nvidia-fabricmanager"))))
    if any(device.vendor == MELLANOX for device in facts.pci) and "nvlsm" not in facts.installed:
        if "nvlsm" not in facts.available:
            why = "this board's NVSwitches need nvlsm beside the fabric manager, and apt offers none"
            return DriverPlan("refuse", f"{why}; take an image that has it")
        plan = replace(plan, install=(*plan.install, "nvlsm"))
    installed = [v for name, v in facts.installed.items() if name.startswith("nvidia-fabricmanager")]
    if version in map(upstream, installed):
        return replace(plan, services=services)
    fitting = [offer for offer in facts.available.get(package, ()) if upstream(offer) == version]
    if not fitting:
        offers = ", ".join(upstream(offer) for offer in facts.available.get(package, ())) or "none"
        return DriverPlan(
            "refuse",
            f"this machine has an NVSwitch and needs {package} of exactly {version}, apt offers {offers}; "
            "take a driver version that has both",
        )
    services = tuple(dict.fromkeys((*services, "nvidia-fabricmanager")))
    return replace(plan, install=(*plan.install, f"{package}={fitting[0]}"), services=services)


def _pending(facts: DriverFacts, name: str) -> tuple[str, ...]:
    """The service, if it is installed and not yet as it should be; a .run driver brings none."""
    unit = facts.units.get(name)
    return () if unit is None or (unit.active and unit.enabled) else (name,)


def _unheld(facts: DriverFacts) -> tuple[str, ...]:
    """Driver packages an unattended upgrade could move away from under the loaded module."""
    ours = re.compile(r"(lib)?nvidia-.*|linux-modules-nvidia-.*|linux-objects-nvidia-.*")
    return tuple(sorted(n for n in facts.installed if ours.fullmatch(n) and n not in facts.held))
