"""The doctor: what the nodes said -> findings, each with the command that repairs it, and their table."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rich.console import Console
from rich.text import Text

from deploy.survey import Login, NodeAnswer, NodeSurvey, running
from inventory.nodes import Node
from inventory.terminal import table
from training.run.launch import MASTER_PORTS
from training.text.counts import many
from training.text.files import SHELL_ADVICE

SKEW_WARNING_S = 1.0
SKEW_BROKEN_S = 30.0
DRIVER_FOR_CUDA = {13: 580, 12: 525, 11: 450}
"""Oldest driver branch for each CUDA generation (docs.nvidia.com/deploy/cuda-compatibility)."""
FREE_GIB = {"/data": (5.0, 1.0), "/": (2.0, 0.5)}
"""Below the first a warning, below the second broken."""

PORTS = f"{MASTER_PORTS.start} to {MASTER_PORTS[-1]}"
"""Where runs meet."""

Level = Literal["fine", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """One check on one node."""

    node: str
    check: str
    level: Level
    message: str
    mend: str = ""


def examine(survey: NodeSurvey) -> list[Finding]:
    """Every check on every node, check by check in the order a cluster is built."""
    findings = []
    for name, check in CHECKS.items():
        for node in survey.nodes:
            answer = survey.answers.get(node.name)
            if answer is not None and (result := check(node, answer, survey)) is not None:
                findings.append(Finding(node.name, name, *result))
    return [*_reached(survey), *findings]


Result = tuple[Level, str, str] | tuple[Level, str]
Check = Callable[[Node, NodeAnswer, NodeSurvey], Result | None]
"""Level, message and mend; None where the check does not apply to the node."""


def _on(node: Node, command: str) -> str:
    """How to run a command as root on a node from here."""
    return f"fab ssh {node.name} -- {'' if node.user == 'root' else 'sudo -n '}{command}"


def _reached(survey: NodeSurvey) -> Iterable[Finding]:
    if lacking := survey.lacking:
        yield Finding(", ".join(lacking.names), "machines", "warning", lacking.message, lacking.mend)
    for node in survey.nodes:
        if node.stopped:
            yield Finding(node.name, "reached", "broken", "is stopped", "fab up")
        elif error := survey.unreachable.get(node.name):
            # where the reason leaves that open, ssh says more
            yield Finding(node.name, "reached", "broken", str(error), getattr(error, "mend", "") or _on(node, "true"))
        else:
            yield Finding(node.name, "reached", "fine", "answers over ssh")


def _named(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result:
    if answer.hostname != node.name:
        return "broken", f"calls itself {answer.hostname}", survey.deploy_command
    wrong = [
        f"{other.name} is {', '.join(addresses) or 'unknown'}, not {other.private_address}"
        for other in survey.nodes
        if (addresses := answer.resolved.get(other.name, ())) != (other.private_address,)
    ]
    if wrong:
        return "broken", "; ".join(wrong), survey.deploy_command
    return "fine", "all names resolve to private addresses"


def _shell(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result:
    if greeting := survey.greetings.get(node.name):
        return "warning", f"its shell prints {greeting!r} for every command, which breaks sftp and rsync", SHELL_ADVICE
    return "fine", "prints nothing by itself"


def _trusted(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result | None:
    if node.rank != 0:
        return None
    wrong = []
    for other in survey.nodes:
        login = answer.logins.get(other.name, Login(error="not tried"))
        if not login.host:
            wrong.append(f"{other.name}: {login.error}")
        elif login.host != other.name:
            wrong.append(f"{other.name} leads to {login.host}")
    if wrong:
        return "broken", f"ssh from here fails: {'; '.join(wrong)}", survey.deploy_command
    return "fine", "ssh from here reaches every node"


def _clock(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result:
    """Against the head's clock: what matters is that the nodes agree."""
    mend = _on(node, "timedatectl set-ntp true")
    reference = survey.offsets_s.get(survey.nodes[0].name, 0.0)
    skew = abs(survey.offsets_s[node.name] - reference)
    if skew > SKEW_WARNING_S:
        return "broken" if skew > SKEW_BROKEN_S else "warning", f"clock is {skew:.1f} s off the head's", mend
    if answer.clock_synchronised is False:
        return "warning", "no time service keeps the clock", mend
    return "fine", f"within {SKEW_WARNING_S:.0f} s of the head's"


def _data(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result:
    if not answer.data_mounted:
        return "broken", "/data is not a mount point", survey.deploy_command
    return "fine", "/data is mounted"


def _space(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result:
    free = {"/": answer.root_free_gib}
    if answer.data_mounted:
        free["/data"] = answer.data_free_gib
    short = {path: gib for path, gib in free.items() if gib < FREE_GIB[path][0]}
    if short:
        level: Level = "broken" if any(gib < FREE_GIB[path][1] for path, gib in short.items()) else "warning"
        shortage = ", ".join(f"{gib} GiB free on {path}" for path, gib in short.items())
        return level, shortage, _on(node, "du -xh --max-depth=2 /data")
    return "fine", ", ".join(f"{gib} GiB free on {path}" for path, gib in sorted(free.items()))


def _internet(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result:
    if far := survey.far.get(node.name):
        mend = '[mirrors] preset = "china" in cluster.toml, or a way to the internet for the node'
        return "broken", f"does not reach {', '.join(far)}, which the base deploy fetches from", mend
    return "fine", "can reach every site that the base deploy still needs to download from"


def _gpus(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result:
    if answer.pci_gpus != node.gpus:
        mend = f"set gpus = {answer.pci_gpus} for {node.name} in cluster.toml"
        return "broken", f"{many(answer.pci_gpus, 'GPU')} on the PCI bus, {node.gpus} in cluster.toml", mend
    if not node.gpus:
        return "fine", "no GPU, as in cluster.toml"
    if answer.smi_error and answer.driver_loaded:  # a lost GPU, or libraries of another version
        mend = f"{_on(node, 'reboot')}; if that does not help, {survey.deploy_command} says more"
        return "broken", f"nvidia-smi: {answer.smi_error}", mend
    if answer.smi_error:
        return "broken", f"nvidia-smi: {answer.smi_error}", survey.deploy_command
    if answer.smi_gpus != answer.pci_gpus:
        return "broken", f"nvidia-smi sees {answer.smi_gpus} of {many(answer.pci_gpus, 'GPU')}", _on(node, "reboot")
    return "fine", f"{many(answer.smi_gpus, 'GPU')}, as in cluster.toml"


def _driver(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result | None:
    if not answer.pci_gpus:
        return None
    loaded, installed = answer.driver_loaded, answer.driver_installed
    if not loaded:
        return "broken", "no NVIDIA driver is loaded", survey.deploy_command
    if installed and installed != loaded:
        return "broken", f"driver {loaded} is loaded, {installed} is installed", _on(node, "reboot")
    return "fine", f"driver {loaded}"


def _torch(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result | None:
    if not answer.torch:
        return None
    if not node.gpus:
        return "fine", f"torch {answer.torch}"
    if not answer.torch_cuda:
        mend = f'set python.torch = "cuda" in cluster.toml, then {survey.deploy_command}'
        return "broken", f"torch {answer.torch} is built for the CPU", mend
    needed = DRIVER_FOR_CUDA.get(int(answer.torch_cuda.partition(".")[0]), max(DRIVER_FOR_CUDA.values()))
    branch = int(answer.driver_loaded.partition(".")[0] or 0)
    message = f"torch {answer.torch}, CUDA {answer.torch_cuda}, needs driver {needed} or newer"
    if branch < needed:
        return "broken", f"{message}; loaded: {answer.driver_loaded or 'none'}", survey.deploy_command
    return "fine", message


def _environment(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result:
    if not answer.environment:
        return "broken", "no Python environment at /data/env", survey.deploy_command
    if survey.head is not None and answer.environment != survey.head.environment:
        return "broken", "the Python environment is not the head's", survey.deploy_command
    if survey.environment not in ("", answer.environment):
        return "warning", "the Python environment is not the one that cluster.toml asks for now", survey.deploy_command
    return "fine", f"environment {answer.environment[:12]}"


def _models(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result:
    head = survey.head or answer
    missing = [name for name in survey.models if not answer.models.get(name)]
    if missing:
        return "broken", f"no {', '.join(missing)} under /data/models", survey.deploy_command
    wanted = {name: head.models[name] for name in survey.models if head.models.get(name)}
    wrong = [name for name, manifest in wanted.items() if answer.models[name] != manifest]
    if wrong:
        return "broken", f"{', '.join(wrong)}: not the files the head has", survey.deploy_command
    return "fine", ", ".join(survey.models) or "none asked for in cluster.toml"


def _port(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result | None:
    if node.rank != 0:
        return None
    if answer.free_ports is not None:
        return "fine", f"ports {answer.free_ports} and {answer.free_ports + 1} are free for a run"
    return "broken", f"no two ports in a row are free from {PORTS}, where runs meet", _on(node, "ss -ltnp")


def _shut(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result | None:
    """torch's store takes orders, pickled Python among them, from whoever reaches it."""
    if node.name not in survey.reached:
        return None
    at = survey.reached[node.name]
    if at is None:
        return "fine", f"ports {PORTS} are shut to this machine"
    public = ipaddress.ip_address(at).is_global
    who = "anyone on the internet" if public else "everyone on this network"
    message = f"port {answer.free_ports} is open to this machine at {at}; {who} could command a run at {PORTS}"
    return "broken" if public else "warning", message, "let only ssh and the other nodes in: docs/own-machines.md"


def _idle(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result | None:
    if not answer.pci_gpus:
        return None
    strangers = [p for p in answer.gpu_processes if p.run not in running(survey.answers.values())]
    if strangers:
        who = ", ".join(f"{p.pid} ({p.user}, {p.age})" for p in strangers)
        return "warning", f"GPU held by processes of no active run: {who}", "fab gpu.kill"
    return "fine", "no process holds a GPU but active runs'"


def _spot_watch(node: Node, answer: NodeAnswer, survey: NodeSurvey) -> Result | None:
    if not survey.rented:
        return None
    if answer.spot_watch != "active":
        message = f"nothing watches for the cloud's notice (the watcher is {answer.spot_watch or 'not there'})"
        return "broken", message, survey.deploy_command
    if answer.reclaim_at:
        mend = "when it is gone: fab rebuild, or fab up and the base deploy"
        return "warning", f"the cloud takes this machine back at {answer.reclaim_at}", mend
    return "fine", "the cloud's notice is watched for"


CHECKS: Mapping[str, Check] = {
    "shell": _shell,
    "names": _named,
    "ssh": _trusted,
    "clock": _clock,
    "data disk": _data,
    "space": _space,
    "internet": _internet,
    "GPUs": _gpus,
    "driver": _driver,
    "torch": _torch,
    "environment": _environment,
    "models": _models,
    "port": _port,
    "firewall": _shut,
    "GPU processes": _idle,
    "spot notice": _spot_watch,
}


COLOURS = {"fine": "green", "warning": "yellow", "broken": "red"}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """One row a check where all is well, one a node where it is not; every mending command once below.

    The console is one of `inventory.shown`: what nodes say is no markup.
    """
    rows = [
        (check, nodes, Text(level, COLOURS[level]), message)
        for check, group in groupby(findings, key=lambda finding: finding.check)
        for nodes, level, message in _rows(list(group))
    ]
    console.print(table(("check", "node", "state", "what"), rows, {"node", "what"}))
    mends: dict[str, list[str]] = {}
    for finding in findings:
        if finding.mend and finding.node not in mends.setdefault(finding.mend, []):
            mends[finding.mend].append(finding.node)
    if mends:
        console.print("\nTo fix it:")
    for command, nodes in mends.items():
        console.print(f"  {', '.join(nodes)}: {command}", soft_wrap=True)


def _rows(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """(nodes, level, message): equal answers share a row, and so does whatever is fine."""
    fine = [finding for finding in findings if finding.level == "fine"]
    rows: list[tuple[str, str, str]] = []
    for level, message in dict.fromkeys((f.level, f.message) for f in findings if f.level != "fine"):
        nodes = [f.node for f in findings if (f.level, f.message) == (level, message)]
        rows.append((", ".join(nodes), level, message))
    if fine:
        who = f"all {len(fine)}" if len(fine) == len(findings) > 1 else ", ".join(f.node for f in fine)
        same = len({f.message for f in fine}) == 1
        rows.append((who, "fine", fine[0].message if same else f"{fine[0].node}: {fine[0].message}"))
    return rows
