"""The driver's deploy through pyinfra: which commands a node gets, on fake hosts and on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from deploy.driver_facts import LIST_PCI, inspect_command, parse_facts, parse_pci

REPOSITORY = Path(__file__).parents[2]
KERNEL = "5.15.0-160-generic"

SCRIPT = """
import json, sys
from pyinfra.api import Config, Inventory, State
from pyinfra.api.connect import connect_all
from pyinfra.api.deploy import add_deploy
from pyinfra.api.operations import run_ops
from deploy.nvidia import install_driver
from inventory.settings import Driver, Settings

def host(name, answer):
    responses = {
        "echo '[system]'": answer,
        "for d in /sys/bus/pci": answer.split("[system]")[0],
        "exit 9": {"success": False},
    }
    settings = Settings(driver=Driver(reboot=False))
    return f"@fake/{name}", {"settings": settings, "fake_responses": responses, "fake_delay": 0,
                             "fake_delay_jitter": 0}

answers = json.loads(sys.argv[1])
state = State(Inventory(([host(*pair) for pair in answers.items()], {})), Config())
connect_all(state)
add_deploy(state, install_driver)
run_ops(state)
told = {h.name.removeprefix("@fake/"): h.connector.executed_commands for h in state.inventory}
print(json.dumps({name: [c for c in commands if "/sys/bus/pci" not in c] for name, commands in told.items()}))
"""


def answer(pci: str = "0x10de 0x030200 0x2236", system: str = "", loaded: str = "", offers: str = "") -> str:
    return (
        f"[pci]\n{pci}\n[system]\nkernel={KERNEL}\nrelease=22.04\ndistribution=ubuntu\n{system}\n"
        f"[loaded]\n{loaded}\n[sources]\n[installed]\n[held]\n[available]\n{offers}"
    )


def offers() -> str:
    names = (
        f"linux-modules-nvidia-580-server-open-{KERNEL}",
        "nvidia-headless-no-dkms-580-server-open",
        "nvidia-utils-580-server",
        "nvidia-compute-utils-580-server",
    )
    return "".join(f"{name} | 580.178.04-0ubuntu1 | x\n" for name in names)


def commands(answers: dict[str, str]) -> dict[str, list[str]]:
    """What each fake node was told to do, apart from questions."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(answers)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, list[str]] = json.loads(result.stdout)
    return found


def test_a_bare_gpu_node_installs_loads_and_starts_and_a_node_without_gpu_does_nothing() -> None:
    done = commands({"a10": answer(offers=offers()), "cpu": answer(pci="")})
    text = "\n".join(done["a10"])
    assert "install linux-modules-nvidia-580-server-open" in text
    assert text.index("apt-get") < text.index("modprobe nvidia") < text.index("nvidia-persistenced")
    assert "reboot" not in text
    assert done["cpu"] == []


def test_a_refusing_node_stops_with_the_reason_and_the_others_go_on() -> None:
    old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue"
    refusing = answer(system="run_file=yes", loaded=old)
    done = commands({"run": refusing, "a10": answer(offers=offers())})
    assert "nvidia-uninstall" in done["run"][0]
    assert "exit 9" in done["run"][0]
    assert any("apt-get" in command for command in done["a10"])


def test_a_node_that_may_not_reboot_says_that_it_has_to() -> None:
    other = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Tue"
    done = commands({"a10": answer(system="module=580.178.04", loaded=other), "cpu": answer(pci="")})
    assert len(done["a10"]) == 1
    assert "driver.reboot = false" in done["a10"][0]
    assert "exit 9" in done["a10"][0]


def test_an_adequate_driver_gets_no_command() -> None:
    right = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.178.04  Release"
    assert commands({"a10": answer(system="module=580.178.04", loaded=right)}) == {"a10": []}


def test_the_questions_run_on_this_machine_and_are_understood() -> None:
    out = subprocess.run(["sh", "-c", inspect_command(580)], capture_output=True, text=True, check=True).stdout
    facts = parse_facts(out.splitlines())
    assert facts.kernel
    assert facts.distribution
    pci = subprocess.run(["sh", "-c", LIST_PCI], capture_output=True, text=True, check=False).stdout
    assert parse_pci(pci.splitlines()) == facts.pci
