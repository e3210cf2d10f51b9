"""End a run: it saves, leaves, and no rank is left anywhere."""

from __future__ import annotations

from collections.abc import Mapping

from training.laptop import attach, runs
from training.laptop.attach import RunFailed
from training.laptop.head_node import Head
from training.laptop.new_run import SOURCE
from training.laptop.open_cluster import Session
from training.run.folder import unit_of
from training.run.launch import sweep_command
from training.text.files import bounded_json


def stop(cluster: Session, run_id: str | None) -> None:
    """End a run: the one asked for, else the one that is going on, else the newest. Raises RunFailed where a process of
    it is left on a node."""
    head = cluster.head
    active = None if run_id else next((seen.run_id for seen in runs.all_runs(head) if seen.active), None)
    run_id = active or runs.find(head, run_id)
    seen = runs.look(head, run_id)
    if not seen.over:
        ask_to_stop(head, run_id)
        print(f"{run_id} is asked to save and stop")
        seen = attach.attach(head, run_id) or seen
    # a run whose supervisor is gone has nobody else to end its ranks
    code = str(SOURCE.parent) if head.here else ""
    command = sweep_command(runs.read_launch(head, run_id), only_list=seen.state != "lost", code=code)
    if left := left_on(cluster.ask_all(command)):
        raise RunFailed(f"{run_id}: {'; '.join(left)}")
    print(f"{run_id} {seen.state}; no process of it is left on any node")
    if seen.state != "finished" and runs.is_training(run_id):
        print(way_on(head, run_id))


def way_on(head: Head, run_id: str) -> str:
    """What is saved of a run that is over, and how it goes on."""
    step = runs.newest_checkpoint(head, run_id)
    if step is None:
        return "it ended before its first checkpoint: start anew with fab train"
    return f"saved at step {step}; go on: {attach.resume_command(run_id, head.here)}"


def ask_to_stop(head: Head, run_id: str) -> None:
    """Ask a run's supervisor to let the ranks save and leave."""
    if head.here:
        seen = runs.look(head, run_id)
        if seen.alive and seen.status:
            head.shell(f"kill -TERM {seen.status.supervisor_pid}")
    else:
        head.shell(f"systemctl stop --no-block {unit_of(run_id)}")


def left_on(answers: Mapping[str, str | Exception]) -> list[str]:
    """One phrase for each node that is not clean of a run, from the nodes' answers to `sweep_command`."""
    phrases = []
    for name, answer in answers.items():
        if isinstance(answer, Exception):
            phrases.append(f"{name} could not be asked ({answer})")
        elif left := bounded_json(answer)["left"]:
            phrases.append(f"{name} still has {len(left)} of its processes")
    return phrases
