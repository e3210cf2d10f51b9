"""The doctor: what can be wrong with a cluster becomes a finding with the command that mends it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import deploy.survey
from deploy.doctor import CHECKS, Finding, examine, print_findings
from deploy.survey import PROBE, GpuProcess, Login, NodeAnswer, NodeSurvey, reached_at
from inventory.nodes import Node
from inventory.renting import members
from inventory.settings import Settings
from inventory.ssh import HostKeyError, SshError
from inventory.terminal import console

DEPLOY = "pyinfra -y inventory/static.py deploy/base.py"


def node(rank: int, gpus: int = 1) -> Node:
    return Node(
        name=f"te{rank + 1}",
        rank=rank,
        address=f"203.0.113.{rank + 1}",
        private_address=f"10.0.0.{rank + 1}",
        user="root",
        port=22,
        key=Path("key"),
        known_hosts=Path("known_hosts"),
        gpus=gpus,
    )


NODES = (node(0), node(1))


def answer(of: Node, **changes: Any) -> NodeAnswer:
    return NodeAnswer(
        hostname=of.name,
        data_mounted=True,
        data_free_gib=100,
        root_free_gib=20,
        environment="e" * 64,
        torch="2.13.0",
        torch_cuda="13.0",
        models={"tiny": "m" * 64},
        resolved={n.name: (n.private_address,) for n in NODES},
        logins={n.name: Login(host=n.name) for n in NODES} if of.rank == 0 else {},
        free_ports=29500,
        clock_synchronised=True,
        pci_gpus=of.gpus,
        smi_gpus=of.gpus,
        smi_error="",
        gpu_processes=(),
        driver_loaded="580.178.04",
        driver_installed="580.178.04",
        active_runs=(),
        spot_watch="active",
        reclaim_at="",
    ).model_copy(update=changes)


def survey(**changes_of_te2: Any) -> NodeSurvey:
    return NodeSurvey(
        nodes=NODES,
        answers={"te1": answer(NODES[0]), "te2": answer(NODES[1], **changes_of_te2)},
        unreachable={},
        offsets_s={"te1": 3600.0, "te2": 3600.2},
        models=("tiny",),
        deploy_command=DEPLOY,
        rented=True,
        reached={"te1": None, "te2": None},
    )


def wrong(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "fine"]


def test_a_healthy_cluster_is_fine_and_every_check_says_so() -> None:
    findings = examine(survey())
    assert wrong(findings) == []
    assert {finding.check for finding in findings} == {"reached", *CHECKS}


def process(run: str = "") -> GpuProcess:
    return GpuProcess(pid=7, memory_mib=900, user="ann", age="02:11", command="python", start="1", run=run)


@pytest.mark.parametrize(
    ("changes", "check", "level", "words", "mend"),
    [
        ({"hostname": "iZ0abc"}, "names", "broken", "iZ0abc", DEPLOY),
        ({"resolved": {"te1": ("10.0.0.1",)}}, "names", "broken", "te2 is unknown, not 10.0.0.2", DEPLOY),
        (
            {"resolved": {"te1": ("10.0.0.1",), "te2": ("127.0.1.1",)}},
            "names",
            "broken",
            "te2 is 127.0.1.1, not 10.0.0.2",
            DEPLOY,
        ),
        ({"clock_synchronised": False}, "clock", "warning", "no time service", "timedatectl"),
        ({"data_mounted": False}, "data disk", "broken", "not a mount point", DEPLOY),
        ({"data_free_gib": 3.0}, "space", "warning", "3.0 GiB free on /data", "du"),
        ({"root_free_gib": 0.1}, "space", "broken", "0.1 GiB free on /", "du"),
        ({"pci_gpus": 2}, "GPUs", "broken", "2 GPUs on the PCI bus, 1 in cluster.toml", "set gpus = 2"),
        ({"smi_gpus": 0}, "GPUs", "broken", "sees 0 of 1", "reboot"),
        ({"smi_error": "Driver/library version mismatch"}, "GPUs", "broken", "mismatch", "-- reboot; if"),
        ({"smi_error": "not found", "driver_loaded": ""}, "GPUs", "broken", "not found", DEPLOY),
        ({"driver_loaded": "535.183.01"}, "driver", "broken", "535.183.01 is loaded", "reboot"),
        (
            {"driver_loaded": "535.183.01", "driver_installed": "535.183.01"},
            "torch",
            "broken",
            "needs driver 580 or newer; loaded: 535.183.01",
            DEPLOY,
        ),
        ({"torch_cuda": ""}, "torch", "broken", "built for the CPU", "python.torch"),
        ({"environment": ""}, "environment", "broken", "no Python environment", DEPLOY),
        ({"environment": "f" * 64}, "environment", "broken", "not the head's", DEPLOY),
        ({"models": {}}, "models", "broken", "no tiny under /data/models", DEPLOY),
        ({"models": {"tiny": "other"}}, "models", "broken", "not the files the head has", DEPLOY),
        (
            {"gpu_processes": (process("tiny-1"),)},
            "GPU processes",
            "warning",
            "7 (ann, 02:11)",
            "fab gpu.kill",
        ),
        ({"spot_watch": "activating"}, "spot notice", "broken", "the watcher is activating", DEPLOY),
        ({"spot_watch": ""}, "spot notice", "broken", "the watcher is not there", DEPLOY),
        (
            {"reclaim_at": "2026-01-31T12:03:00Z"},
            "spot notice",
            "warning",
            "the cloud takes this machine back at 2026-01-31T12:03:00Z",
            "when it is gone: fab rebuild, or fab up and the base deploy",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_cure(
    changes: dict[str, Any], check: str, level: str, words: str, mend: str
) -> None:
    found = [finding for finding in wrong(examine(survey(**changes))) if finding.check == check]
    assert len(found) == 1, examine(survey(**changes))
    assert (found[0].node, found[0].level) == ("te2", level)
    assert words in found[0].message
    assert mend in found[0].mend


def test_an_unreachable_node_is_broken_with_its_reason_and_the_others_are_still_checked() -> None:
    whole = survey()
    lost = replace(whole, answers={"te1": whole.answers["te1"]}, unreachable={"te2": SshError("te2: refuses the key")})
    found = wrong(examine(lost))
    assert [(f.node, f.check, f.message) for f in found] == [("te2", "reached", "te2: refuses the key")]
    assert found[0].level == "broken"


def test_a_machine_that_is_missing_altogether_is_a_warning_with_the_commands_that_make_it_again() -> None:
    settings = Settings.model_validate({"name": "demo", "provider": "aliyun", "aliyun": {"nodes": 3}})
    lacking = members.lacking(["te1", "te3"], settings)
    found = examine(replace(survey(), lacking=lacking))
    (finding,) = wrong(found)
    assert (finding.node, finding.check, finding.level) == ("te2", "machines", "warning")
    assert finding.message == (
        "2 of the 3 machines that cluster.toml wants are there, te2 is not; runs go on with 2 machines"
    )
    assert finding.mend.startswith("fab rebuild makes te2 from the newest snapshot, fab up and pyinfra ")
    assert finding.mend.endswith("; aliyun.nodes = 2 in cluster.toml if 2 machines will do")


def test_clocks_are_compared_with_the_heads_not_with_this_machines() -> None:
    whole = survey()
    assert wrong(examine(whole)) == [], "both an hour off this machine, but together"
    off = wrong(examine(replace(whole, offsets_s={"te1": 0.0, "te2": -2.0})))
    assert [(f.node, f.level) for f in off] == [("te2", "warning")]
    assert "2.0 s" in off[0].message
    far = wrong(examine(replace(whole, offsets_s={"te1": 0.0, "te2": 31.0})))
    assert [f.level for f in far] == ["broken"]


def with_head(**changes: Any) -> NodeSurvey:
    whole = survey()
    return replace(whole, answers={**whole.answers, "te1": answer(NODES[0], **changes)})


def test_ssh_from_the_head_that_fails_or_leads_elsewhere_is_broken() -> None:
    failing = {"te1": Login(host="te1"), "te2": Login(error="Host key verification failed.")}
    found = wrong(examine(with_head(logins=failing)))
    assert [(f.check, f.message) for f in found] == [("ssh", "ssh from here fails: te2: Host key verification failed.")]
    astray = {"te1": Login(host="te1"), "te2": Login(host="te1")}
    assert "te2 leads to te1" in wrong(examine(with_head(logins=astray)))[0].message


def test_a_run_needs_two_free_ports_in_a_row_on_the_head_only() -> None:
    found = wrong(examine(with_head(free_ports=None)))
    assert [(f.node, f.check, f.level) for f in found] == [("te1", "port", "broken")]
    assert "from 29500 to 29599" in found[0].message
    assert found[0].mend.endswith("ss -ltnp")
    assert wrong(examine(with_head(free_ports=29502))) == []
    assert wrong(examine(survey(free_ports=None))) == []


@pytest.mark.parametrize(
    ("at", "level", "who"),
    [("8.8.8.8", "broken", "anyone on the internet"), ("192.168.1.7", "warning", "everyone on this network")],
)
def test_a_port_where_runs_meet_that_is_open_to_this_machine_is_said(at: str, level: str, who: str) -> None:
    reached = {"te1": at, "te2": None}
    (found,) = wrong(examine(replace(survey(), reached=reached)))
    assert (found.node, found.check, found.level) == ("te1", "firewall", level)
    assert who in found.message and "29500 to 29599" in found.message
    assert not any(finding.check == "firewall" for finding in examine(replace(survey(), reached={})))


def listening(address: str) -> Callable[..., object]:
    """A node's shell on this machine, where the probe listens on `address` alone."""
    script = PROBE.read_text().replace('("", port)', f'("{address}", port)')

    def run(*arguments: str) -> object:
        return subprocess.run([sys.executable, "-c", script, *arguments], check=True)

    return run


def test_a_port_is_open_only_where_our_own_listener_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.survey, "LISTEN_S", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert reached_at("127.0.0.1", port, listening("")) == "127.0.0.1"
    assert reached_at("127.0.0.1", port, listening("127.0.0.2")) is None, "a refusal is no answer"
    with socket.create_server(("127.0.0.1", port), backlog=8):
        assert reached_at("127.0.0.1", port, listening("127.0.0.2")) is None, "a stranger is no answer"


def test_an_environment_that_cluster_toml_does_not_ask_for_any_more_is_said() -> None:
    found = wrong(examine(replace(survey(), environment="f" * 64)))
    assert {(f.node, f.check, f.level, f.mend) for f in found} == {
        (name, "environment", "warning", DEPLOY) for name in ("te1", "te2")
    }


def test_what_mends_a_node_that_is_not_reached_comes_with_the_reason_else_ssh_says_more() -> None:
    whole = survey()
    lost = replace(whole, answers={"te1": whole.answers["te1"]})
    for error, shown in ((HostKeyError("another"), "fab trust"), (SshError("whatever"), "fab ssh te2 -- true")):
        found = wrong(examine(replace(lost, unreachable={"te2": error})))
        assert [f.mend for f in found] == [shown]


def test_a_user_who_is_not_root_gets_commands_that_work_for_him() -> None:
    nodes = (replace(NODES[0], user="ubuntu"), NODES[1])
    found = wrong(examine(replace(with_head(clock_synchronised=False), nodes=nodes)))
    assert [f.mend for f in found] == ["fab ssh te1 -- sudo -n timedatectl set-ntp true"]


def test_processes_of_an_active_run_are_no_strangers_on_any_node() -> None:
    whole = survey(gpu_processes=(process("tiny-1"),))
    active = replace(whole, answers={**whole.answers, "te1": answer(NODES[0], active_runs=("tiny-1",))})
    assert wrong(examine(active)) == []


def test_nodes_without_gpus_need_neither_driver_nor_cuda() -> None:
    nodes = (node(0, gpus=0), node(1, gpus=0))
    answers = {
        n.name: answer(n, torch="2.13.0+cpu", torch_cuda="", driver_loaded="", driver_installed="") for n in nodes
    }
    findings = examine(replace(survey(), nodes=nodes, answers=answers))
    assert wrong(findings) == []
    assert "driver" not in {finding.check for finding in findings}


def test_nobody_takes_back_machines_that_are_not_rented() -> None:
    findings = examine(replace(survey(spot_watch="inactive"), rented=False))
    assert "spot notice" not in {finding.check for finding in findings}
    assert wrong(findings) == []


def test_what_a_node_says_is_no_markup_and_nothing_the_terminal_obeys() -> None:
    out = StringIO()
    said = "[/pytorch/third_party/gloo] [rank0] :smile: \x1b]52;c;ZXZpbA==\x07 [link=https://evil]x"
    findings = [Finding("ssh", "te1", "broken", said, f"mend {said}")]
    print_findings(findings, console(file=out, width=200, force_terminal=True, color_system=None))
    text = out.getvalue()
    assert text.count(r"[/pytorch/third_party/gloo] [rank0] :smile: \x1b]52;c;ZXZpbA==\x07 [link=https://evil]x") == 2
    assert "\x1b]" not in text and "\x07" not in text


def test_the_table_fits_80_columns_and_lists_every_cure_once() -> None:
    whole = survey(data_mounted=False, environment="")
    out = StringIO()
    print_findings(examine(whole), console(file=out, width=80))
    text = out.getvalue()
    table = text.split("To fix it:")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert text.count(DEPLOY) == 1
    assert "/data is not a mount point" in text
    assert "all 2" in text
