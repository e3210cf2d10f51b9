"""fab doctor and fab gpu.*: is every node as it should be, and who holds its GPUs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invoke import Collection, Exit, task

from inventory.command_line import FAILURE, ask, sentences, yes_command
from inventory.shown import print_json
from training.text.deferred import deferred

with deferred():
    from deploy import doctor as examination
    from deploy import environment, survey
    from inventory import cluster as clusters
    from inventory import terminal
    from inventory.renting import report
    from training.models import names
    from training.recipe import recipe

if TYPE_CHECKING:
    from deploy.survey import GpuAnswer, Held
    from inventory.cluster import Cluster
    from training.models.names import Model


KEEP_PACKAGES = Path(__file__).parent / "on_node" / "keep_packages.py"
"""Keeps the packages of a node's environment on its data disk, for a snapshot."""


def cpu_requirements() -> str:
    """Every package of a CPU node, for pip."""
    return environment.cpu_requirements(Path(__file__).with_name("requirements.lock").read_text(encoding="utf-8"))


def _cluster() -> Cluster:
    with sentences():
        return clusters.load_cluster()


@task(
    auto_shortflags=False,
    help={"json": "print the findings as JSON", "strict": "a warning too ends with exit code 1"},
)
def doctor(c: Any, json: bool = False, strict: bool = False) -> None:
    """Check every prerequisite on every node; exit code 1 if something is broken."""

    cluster = _cluster()
    with sentences():
        for line in report.elsewhere_lines(cluster.settings):
            print(line)
    findings = examination.examine(survey.survey(cluster, _models(cluster)))
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        examination.print_findings(findings, terminal.console())
    if {finding.level for finding in findings} & ({"warning", "broken"} if strict else {"broken"}):
        raise Exit(code=FAILURE)


def _models(cluster: Cluster) -> list[Model]:
    """Those that cluster.toml names."""
    try:
        return [names.resolve(name) for name in cluster.settings.models.names]
    except recipe.RecipeError as error:
        raise Exit(f"models.names: {error}", code=2) from None


@task(name="list")
def list_gpus(c: Any) -> None:
    """List the processes on every node's GPUs: owner, age, memory."""
    answers, held, silent = _held()
    _show(answers, held)
    if silent:
        raise Exit(f"no answer: {_reasons(silent)}", code=1)


@task(
    help={
        "node": "only on this node",
        "yes": "do not ask",
        "runs-too": "also kill processes of active runs (prefer fab stop)",
    }
)
def kill(c: Any, node: str = "", yes: bool = False, runs_too: bool = False) -> None:
    """Kill GPU processes that belong to no active run; asks first."""
    cluster = _cluster()
    if node and node not in {known.name for known in cluster.nodes}:
        raise Exit(f"there is no node {node}; there are {', '.join(n.name for n in cluster.nodes)}", code=2)
    answers, held, silent = _held()
    _show(answers, held)
    if silent:
        without = "without every node's answer it is unknown which runs are active; nothing was ended"
        raise Exit(f"{_reasons(silent)}; {without}", code=2)
    chosen = [one for one in held if node in ("", one.node) and (runs_too or not one.protected)]
    if not chosen:
        print("nothing to end")
        return
    noun = "process" if len(chosen) == 1 else "processes"
    ask(yes, f"end {len(chosen)} {noun}?", yes_command("gpu.kill", kill, node=node, runs_too=runs_too))
    commands = {
        name: survey.kill_command(one.process for one in chosen if one.node == name)
        for name in {one.node for one in chosen}
    }
    if failed := survey.tell(cluster.nodes, commands):
        raise Exit(_reasons(failed), code=1)
    print(f"ended {len(chosen)}")


def _held() -> tuple[dict[str, GpuAnswer], list[Held], dict[str, str]]:
    """What each node says of its GPUs, who holds them, and why the other nodes say nothing."""
    answers, silent = survey.ask_gpus(_cluster().nodes)
    return answers, survey.held(answers), silent


def _reasons(by_node: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in by_node.items())


def _show(answers: dict[str, GpuAnswer], held: list[Held]) -> None:
    without = [name for name, answer in answers.items() if not answer.pci_gpus]
    idle = [name for name in answers if name not in without and name not in {one.node for one in held}]
    if without:
        print(f"no GPU: {', '.join(without)}")
    if idle:
        print(f"no process on the GPUs of: {', '.join(idle)}")
    if not held:
        return
    rows = []
    for one in held:
        process = one.process
        memory = "?" if process.memory_mib is None else str(process.memory_mib)
        run = f"{process.run or '-'}{' (active)' if one.protected else ''}"
        rows.append((one.node, str(process.pid), process.user, process.age, memory, run, process.command))
    terminal.console().print(terminal.table(("node", "pid", "user", "age", "MiB", "run", "command"), rows, {"command"}))


gpu = Collection("gpu")
gpu.add_task(list_gpus)
gpu.add_task(kill)

namespace = Collection(doctor, gpu)
