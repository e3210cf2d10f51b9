"""fab doctor and fab gpu.*: is every node as it should be, and who holds its GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from invoke import Collection, Exit, task

from inventory.command_line import ask, sentences, yes_command

if TYPE_CHECKING:
    from deploy.survey import GpuAnswer, Held
    from inventory.cluster import Cluster
    from training.model_names import NamedModel


def _cluster() -> Cluster:
    from inventory.cluster import load_cluster

    with sentences():
        return load_cluster()


@task(help={"json": "print the findings as JSON instead of a table"})
def doctor(c: Any, json: bool = False) -> None:
    """Check every prerequisite on every node; exits 0, 1 or 2.

    0: fine, 1: warnings, 2: something is broken.
    """
    import sys
    from dataclasses import asdict
    from json import dumps

    from deploy.doctor import EXIT_CODES, examine, print_findings, worst
    from deploy.survey import survey
    from inventory.renting.report import elsewhere_lines
    from inventory.shown import console

    cluster = _cluster()
    with sentences():
        for line in elsewhere_lines(cluster.settings):
            print(line, file=sys.stderr if json else sys.stdout)
    findings = examine(survey(cluster, _models(cluster)))
    if json:
        print(dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print_findings(findings, console())
    if code := EXIT_CODES[worst(findings)]:
        raise Exit(code=code)


def _models(cluster: Cluster) -> list[NamedModel]:
    """Those that cluster.toml names."""
    from training.model_names import named_model
    from training.recipe import RecipeError

    try:
        return [named_model(name) for name in cluster.settings.models.names]
    except RecipeError as error:
        raise Exit(f"models.names: {error}", code=2) from None


@task(name="list")
def list_gpus(c: Any) -> None:
    """Processes on every node's GPUs: whose, how long, how big."""
    answers, found, silent = _held()
    _show(answers, found)
    if silent:
        raise Exit(f"no answer: {_reasons(silent)}", code=1)


@task(
    help={
        "node": "only on this node",
        "yes": "do not ask",
        "runs-too": "also processes of active runs (better: fab stop)",
    }
)
def kill(c: Any, node: str = "", yes: bool = False, runs_too: bool = False) -> None:
    """End GPU processes that belong to no active run; asks first."""
    from deploy.survey import kill_command, tell

    cluster = _cluster()
    if node and node not in {known.name for known in cluster.nodes}:
        raise Exit(f"there is no node {node}; there are {', '.join(n.name for n in cluster.nodes)}", code=2)
    answers, found, silent = _held()
    _show(answers, found)
    if silent:
        without = "without every node's answer it is unknown which runs are active; nothing was ended"
        raise Exit(f"{_reasons(silent)}; {without}", code=2)
    chosen = [one for one in found if node in ("", one.node) and (runs_too or not one.protected)]
    if not chosen:
        print("nothing to end")
        return
    noun = "process" if len(chosen) == 1 else "processes"
    ask(yes, f"end {len(chosen)} {noun}?", yes_command("gpu.kill", kill, node=node, runs_too=runs_too))
    commands = {
        name: kill_command(one.process for one in chosen if one.node == name) for name in {one.node for one in chosen}
    }
    if failed := tell(cluster.nodes, commands):
        raise Exit(_reasons(failed), code=1)
    print(f"ended {len(chosen)}")


def _held() -> tuple[dict[str, GpuAnswer], list[Held], dict[str, str]]:
    """What each node says of its GPUs, who holds them, and why the other nodes say nothing."""
    from deploy.survey import ask_gpus, held

    answers, silent = ask_gpus(_cluster().nodes)
    return answers, held(answers), silent


def _reasons(by_node: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in by_node.items())


def _show(answers: dict[str, GpuAnswer], found: list[Held]) -> None:
    from inventory.shown import console, table

    without = [name for name, answer in answers.items() if not answer.pci_gpus]
    idle = [name for name in answers if name not in without and name not in {one.node for one in found}]
    if without:
        print(f"no GPU: {', '.join(without)}")
    if idle:
        print(f"no process on the GPUs of: {', '.join(idle)}")
    if not found:
        return
    rows = []
    for one in found:
        process = one.process
        memory = "?" if process.memory_mib is None else str(process.memory_mib)
        run = f"{process.run or '-'}{' (active)' if one.protected else ''}"
        rows.append((one.node, str(process.pid), process.user, process.age, memory, run, process.command))
    console().print(table(("node", "pid", "user", "age", "MiB", "run", "command"), rows, {"command"}))


gpu = Collection("gpu")
gpu.add_task(list_gpus)
gpu.add_task(kill)

namespace = Collection(doctor, gpu)
