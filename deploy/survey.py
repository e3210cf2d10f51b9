"""Asks the nodes: sends deploy/probe.py over ssh to all of them at once and reads their answers."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.doctor import Answer, GpuAnswer, Survey
from inventory.cluster import Cluster
from inventory.nodes import Node
from inventory.ssh import connect, on_all, run
from training.launch import MASTER_PORTS


def survey(cluster: Cluster, models: Sequence[str]) -> Survey:
    """Everything the doctor looks at; a node that gives no answer is there with the reason."""
    names = [node.name for node in cluster.nodes]
    offsets: dict[str, float] = {}

    def ask(node: Node) -> Answer:
        ports = [MASTER_PORTS.start, MASTER_PORTS.stop]
        question = {"names": names, "ports": ports, "ssh_to": names if node.rank == 0 else []}
        with connect(node) as connection:
            before = time.time()
            there = float(run(connection, "date +%s.%N"))
            offsets[node.name] = there - (before + time.time()) / 2
            return Answer.model_validate_json(run(connection, _probe(question), stdin=_script()))

    found = on_all(cluster.nodes, ask)
    answers = {name: answer for name, answer in found.items() if isinstance(answer, Answer)}
    return Survey(
        nodes=cluster.nodes,
        answers=answers,
        unreachable={name: str(found[name]) for name in names if name not in answers},
        offsets_s=offsets,
        models=models,
        deploy_command=f"pyinfra -y inventory/{cluster.settings.provider}.py deploy/base.py",
        rented=cluster.settings.provider == "aliyun",
    )


def ask_gpus(nodes: Sequence[Node]) -> tuple[dict[str, GpuAnswer], dict[str, str]]:
    """(what each node says of its GPUs, why the others say nothing)."""

    def ask(node: Node) -> GpuAnswer:
        with connect(node) as connection:
            return GpuAnswer.model_validate_json(run(connection, _probe({"gpu_only": True}), stdin=_script()))

    found = on_all(nodes, ask)
    answers = {name: answer for name, answer in found.items() if isinstance(answer, GpuAnswer)}
    return answers, {name: str(error) for name, error in found.items() if name not in answers}


def tell(nodes: Sequence[Node], commands: Mapping[str, str]) -> dict[str, str]:
    """Run each node's command, all at once; why it failed, by node."""

    def do(node: Node) -> str:
        with connect(node) as connection:
            return run(connection, commands[node.name])

    found = on_all([node for node in nodes if node.name in commands], do)
    return {name: str(result) for name, result in found.items() if isinstance(result, Exception)}


def _probe(question: Mapping[str, object]) -> str:
    return f"python3 - {shlex.quote(json.dumps(question))}"


def _script() -> str:
    return Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
