"""The driver's decisions on the facts of known machines.

Every case is "documented": put together from package indexes and manuals, none was recorded on a machine.
Sources: Ubuntu's package indexes (jammy-updates, restricted and multiverse), Debian 12's (non-free), NVIDIA's
CUDA compatibility and driver installation guides, and the kernel's own formats for sysfs and /proc.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.driver_facts import DriverFacts, PciDevice, Unit, inspect_command, parse_facts, parse_loaded
from deploy.driver_plan import plan_driver

KERNEL = "5.15.0-160-generic"
VERSION = "580.178.04"
PACKAGED = f"{VERSION}-0ubuntu0.22.04.1"
SIGNED = f"linux-modules-nvidia-580-server-open-{KERNEL}"
USERLAND = (
    "nvidia-headless-no-dkms-580-server-open",
    "nvidia-utils-580-server",
    "nvidia-compute-utils-580-server",
)

A10 = PciDevice("0x10de", "0x030200", "0x2236")
H200 = PciDevice("0x10de", "0x030200", "0x2335")
V100 = PciDevice("0x10de", "0x030200", "0x1db6")
NVSWITCH = PciDevice("0x10de", "0x068000", "0x22a3")
AUDIO = PciDevice("0x10de", "0x040300", "0x228b")

UBUNTU = DriverFacts(
    pci=(A10,),
    distribution="ubuntu",
    release="22.04",
    kernel=KERNEL,
    available={
        SIGNED: ("5.15.0-160.170+1",),
        "nvidia-dkms-580-server-open": (PACKAGED,),
        "nvidia-dkms-580-server": (PACKAGED,),
        **dict.fromkeys(USERLAND, (PACKAGED,)),
        "nvidia-headless-no-dkms-580-server": (PACKAGED,),
        "nvidia-fabricmanager-580": ("580.126.09-0ubuntu0.22.04.1", PACKAGED),
        f"linux-headers-{KERNEL}": ("5.15.0-160.170",),
    },
)
WITHOUT_SIGNED = {name: offers for name, offers in UBUNTU.available.items() if name != SIGNED}
RUNNING = replace(
    UBUNTU,
    loaded=VERSION,
    module=VERSION,
    installed={"nvidia-utils-580-server": PACKAGED, SIGNED: "5.15.0-160.170+1"},
    held=frozenset({"nvidia-utils-580-server", SIGNED}),
    units={"nvidia-persistenced": Unit(active=True, enabled=True)},
)


def test_documented_a10_on_bare_ubuntu_gets_the_signed_modules_without_a_reboot() -> None:
    plan = plan_driver(UBUNTU)
    assert plan.verdict == "install"
    assert plan.install == (SIGNED, *USERLAND)
    assert plan.loading == "modprobe"
    assert plan.services == ("nvidia-persistenced",)


def test_documented_a10_with_an_adequate_driver_is_left_alone() -> None:
    plan = plan_driver(RUNNING)
    assert plan.verdict == "keep"
    assert "left alone" in plan.reason
    assert (plan.install, plan.hold, plan.loading, plan.services) == ((), (), "nothing", ())


def test_an_adequate_driver_stays_when_a_newer_branch_is_configured() -> None:
    assert plan_driver(RUNNING, branch=595).verdict == "keep"


def test_documented_old_driver_is_replaced_and_the_node_reboots() -> None:
    plan = plan_driver(replace(UBUNTU, loaded="535.183.01", module="535.183.01"))
    assert plan.verdict == "install"
    assert plan.install[0] == SIGNED
    assert plan.loading == "reboot"
    assert "535.183.01" in plan.reason


def test_documented_run_driver_too_old_is_refused_with_the_way_out() -> None:
    plan = plan_driver(replace(UBUNTU, loaded="550.54.15", module="550.54.15", run_file=True))
    assert plan.verdict == "refuse"
    assert "nvidia-uninstall" in plan.reason
    assert plan.install == ()


def test_documented_run_driver_new_enough_is_left_alone_with_no_daemon_to_start() -> None:
    plan = plan_driver(replace(UBUNTU, loaded="590.48.01", module="590.48.01", run_file=True))
    assert (plan.verdict, plan.install, plan.services) == ("keep", (), ())


def test_documented_foreign_repository_is_refused_unless_its_driver_is_adequate() -> None:
    source = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2204/x86_64/"
    plan = plan_driver(replace(UBUNTU, foreign_sources=(source,)))
    assert plan.verdict == "refuse"
    assert source in plan.reason
    assert plan_driver(replace(RUNNING, foreign_sources=(source,))).verdict == "keep"


def test_documented_secure_boot_takes_signed_modules() -> None:
    assert plan_driver(replace(UBUNTU, secure_boot=True)).install[0] == SIGNED


def test_documented_secure_boot_without_signed_modules_is_refused() -> None:
    plan = plan_driver(replace(UBUNTU, secure_boot=True, available=WITHOUT_SIGNED))
    assert plan.verdict == "refuse"
    assert "Secure Boot" in plan.reason
    assert SIGNED in plan.reason


def test_documented_kernel_without_signed_modules_compiles_them() -> None:
    plan = plan_driver(replace(UBUNTU, available=WITHOUT_SIGNED))
    assert plan.install == (f"linux-headers-{KERNEL}", "nvidia-dkms-580-server-open", *USERLAND)


def test_a_kernel_with_neither_modules_nor_headers_is_refused() -> None:
    offers = {name: v for name, v in WITHOUT_SIGNED.items() if not name.startswith("linux-headers")}
    plan = plan_driver(replace(UBUNTU, available=offers))
    assert plan.verdict == "refuse"
    assert f"linux-headers-{KERNEL}" in plan.reason


def test_package_lists_without_the_driver_name_the_components_to_enable() -> None:
    plan = plan_driver(replace(UBUNTU, available={}))
    assert plan.verdict == "refuse"
    assert "restricted" in plan.reason


def test_documented_debian_12_is_refused_with_what_is_possible() -> None:
    offers = {"nvidia-driver": ("535.261.03-1~deb12u1",)}
    plan = plan_driver(replace(UBUNTU, distribution="debian", release="12", available=offers))
    assert plan.verdict == "refuse"
    assert "535.261.03" in plan.reason
    assert "Ubuntu 22.04 or 24.04" in plan.reason


def test_documented_debian_12_image_with_an_adequate_driver_is_kept() -> None:
    assert plan_driver(replace(RUNNING, distribution="debian", release="12")).verdict == "keep"


def test_documented_h200_with_nvswitch_gets_the_fabric_manager_of_exactly_the_drivers_version() -> None:
    plan = plan_driver(replace(UBUNTU, pci=(*(H200,) * 8, *(NVSWITCH,) * 4)))
    assert plan.install == (SIGNED, *USERLAND, f"nvidia-fabricmanager-580={PACKAGED}")
    assert plan.services == ("nvidia-persistenced", "nvidia-fabricmanager")


def test_documented_h200_with_a_driver_but_no_fabric_manager_gets_only_that() -> None:
    plan = plan_driver(replace(RUNNING, pci=(H200, NVSWITCH)))
    assert plan.verdict == "keep"
    assert plan.install == (f"nvidia-fabricmanager-580={PACKAGED}",)
    assert plan.services == ("nvidia-fabricmanager",)


def test_a_fabric_manager_of_another_version_only_is_refused() -> None:
    offers = {**UBUNTU.available, "nvidia-fabricmanager-580": ("580.126.09-0ubuntu0.22.04.1",)}
    plan = plan_driver(replace(RUNNING, pci=(H200, NVSWITCH), available=offers))
    assert plan.verdict == "refuse"
    assert "exactly 580.178.04" in plan.reason
    assert "580.126.09" in plan.reason


def test_documented_h200_with_a_running_fabric_manager_needs_nothing() -> None:
    running = Unit(active=True, enabled=True)
    facts = replace(
        RUNNING,
        pci=(H200, NVSWITCH),
        installed={**RUNNING.installed, "nvidia-fabricmanager-580": PACKAGED},
        held=RUNNING.held | {"nvidia-fabricmanager-580"},
        units={"nvidia-persistenced": running, "nvidia-fabricmanager": running},
    )
    plan = plan_driver(facts)
    assert (plan.verdict, plan.install, plan.hold, plan.services) == ("keep", (), (), ())


def test_documented_volta_gets_the_closed_modules() -> None:
    plan = plan_driver(replace(UBUNTU, pci=(V100,)))
    assert "nvidia-dkms-580-server" in plan.install
    assert not any(name.endswith("-open") for name in plan.install)


def test_nouveau_is_blacklisted_once_and_rebooted_away() -> None:
    plan = plan_driver(replace(UBUNTU, nouveau=True))
    assert plan.blacklist_nouveau
    assert plan.loading == "reboot"
    assert not plan_driver(replace(UBUNTU, nouveau=True, nouveau_blacklisted=True)).blacklist_nouveau


def test_an_interrupted_run_still_reboots_the_next_time() -> None:
    plan = plan_driver(replace(RUNNING, loaded="535.183.01"))
    assert (plan.install, plan.loading) == ((), "reboot")


def test_an_upgrade_behind_the_loaded_drivers_back_reboots() -> None:
    assert plan_driver(replace(RUNNING, loaded="580.126.09")).loading == "reboot"


def test_an_installed_driver_that_is_not_loaded_is_loaded_without_a_reboot() -> None:
    assert plan_driver(replace(RUNNING, loaded="")).loading == "modprobe"


def test_libraries_that_no_module_on_the_disk_fits_are_refused_and_not_held() -> None:
    newer = {"libnvidia-compute-580-server": "580.200.01-0ubuntu0.22.04.1", **RUNNING.installed}
    newer["nvidia-utils-580-server"] = newer["libnvidia-compute-580-server"]
    plan = plan_driver(replace(RUNNING, installed=newer))
    assert (plan.verdict, plan.hold) == ("refuse", ())
    assert "580.200.01" in plan.reason and VERSION in plan.reason
    assert plan_driver(replace(RUNNING, installed=newer, module="580.200.01")).loading == "reboot"
    assert plan_driver(replace(RUNNING, installed=newer, run_file=True)).verdict == "keep"


BRIDGE = PciDevice("0x15b3", "0x020700", "0x1021")


def test_nvswitches_behind_a_bridge_of_another_class_get_the_fabric_manager_and_what_manages_them() -> None:
    bridged = replace(UBUNTU, pci=(H200, BRIDGE))
    assert "nvlsm" in plan_driver(bridged).reason and plan_driver(bridged).verdict == "refuse"
    plan = plan_driver(replace(bridged, available={**UBUNTU.available, "nvlsm": ("2025.06.6-1",)}))
    assert plan.verdict == "install" and {"nvlsm", f"nvidia-fabricmanager-580={PACKAGED}"} <= set(plan.install)
    assert "nvidia-fabricmanager" in plan.services


@pytest.mark.parametrize(
    ("source", "foreign"),
    [
        ("deb file:///var/cuda-repo-ubuntu2204-12-8-local /", True),
        ("deb [signed-by=x] file:/var/nvidia-driver-local-repo-ubuntu2204-580.95.05 /", True),
        ("deb https://mirrors.aliyun.com/nvidia-cuda/ubuntu2204/x86_64 /", True),
        ("URIs: https://developer.download.nvidia.cn/compute/cuda/repos/ubuntu2204/x86_64", True),
        ("deb https://repo.download.nvidia.com/baseos/ubuntu/jammy/x86_64/ jammy common dgx", True),
        ("deb http://ppa.launchpadcontent.net/graphics-drivers/ppa/ubuntu jammy main", True),
        ("deb https://archive.lambdalabs.com/ubuntu jammy main", True),
        ("deb [signed-by=/usr/share/keyrings/nvidia.gpg] http://archive.ubuntu.com/ubuntu jammy main", False),
        ("deb https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH) /", False),
    ],
)
def test_another_source_of_drivers_is_seen_wherever_it_lies(source: str, foreign: bool) -> None:
    text = ANSWER.replace("deb http://a.example/ubuntu jammy main restricted", source).splitlines()
    assert (len(parse_facts(text).foreign_sources) == 2) is foreign


def test_packages_that_nothing_holds_are_held() -> None:
    installed = {**RUNNING.installed, "libnvidia-compute-580-server": PACKAGED, "cuda-keyring": "1.1-1"}
    plan = plan_driver(replace(RUNNING, installed=installed))
    assert plan.hold == ("libnvidia-compute-580-server",)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
            "535.183.01",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x@y)\n"
            "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04.2)",
            "580.95.05",
        ),
        ("", ""),
    ],
)
def test_the_loaded_version_is_read_from_both_kinds_of_module(text: str, version: str) -> None:
    assert parse_loaded(text) == version


ANSWER = f"""[pci]
0x10de 0x030200 0x2236
[system]
kernel={KERNEL}
release=22.04
distribution=ubuntu
nouveau=yes
module={VERSION}
run_file=yes
secure_boot=1
gpu_user=812 nvidia-persiste
gpu_user=4711 python
unit=nvidia-persistenced active static
[loaded]
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.178.04  Release Build
[sources]
deb http://a.example/ubuntu jammy main restricted
deb [signed-by=/usr/share/keyrings/cuda.gpg] https://developer.download.nvidia.com/compute/cuda/repos/u x
[installed]
ii  nvidia-utils-580-server {PACKAGED}
rc  nvidia-utils-535-server 535.183.01-0ubuntu0.22.04.1
un  nvidia-driver-binary{" "}
[held]
nvidia-utils-580-server
[available]
nvidia-utils-580-server | {PACKAGED} | http://a.example/ubuntu jammy-updates/restricted amd64
nvidia-utils-580-server | {PACKAGED} | http://s.example/ubuntu jammy-security/restricted amd64
nvidia-utils-580-server | 580.65.06-0ubuntu0.22.04.1 | http://a.example/ubuntu jammy/restricted amd64
"""


def test_the_answer_of_a_node_is_read_into_facts() -> None:
    assert parse_facts(ANSWER.splitlines()) == DriverFacts(
        pci=(A10,),
        distribution="ubuntu",
        release="22.04",
        kernel=KERNEL,
        loaded=VERSION,
        module=VERSION,
        installed={"nvidia-utils-580-server": PACKAGED},
        held=frozenset({"nvidia-utils-580-server"}),
        available={"nvidia-utils-580-server": (PACKAGED, "580.65.06-0ubuntu0.22.04.1")},
        foreign_sources=("https://developer.download.nvidia.com/compute/cuda/repos/u",),
        run_file=True,
        secure_boot=True,
        nouveau=True,
        gpu_users=("4711 python",),
        units={"nvidia-persistenced": Unit(active=True, enabled=True)},
    )


def test_the_questions_name_every_package_a_plan_may_install() -> None:
    asked = inspect_command(580).replace("KERNEL", KERNEL)
    plans = [
        plan_driver(replace(UBUNTU, pci=(gpu, NVSWITCH), available=offers))
        for gpu in (A10, V100)
        for offers in (UBUNTU.available, WITHOUT_SIGNED)
    ]
    for package in {name.partition("=")[0] for plan in plans for name in plan.install}:
        assert f" {package} " in f" {asked} ".replace("'", " "), package
