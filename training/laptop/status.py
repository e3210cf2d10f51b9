"""What there is: rented machines, nodes that answer, runs."""

from __future__ import annotations

from inventory.renting.report import show_machines
from inventory.settings import load_settings
from inventory.shown import console, length, table
from training import reclaim
from training.bounded import figure_in
from training.laptop import runs
from training.laptop.open_cluster import OpenCluster
from training.laptop.refusals import disk_record, under_notice, who_goes
from training.laptop.terminal import runs_table

BOOTED = "ps -o etimes= -p 1"
"""The first process's age: a host of the local cloud has the kernel, and so the uptime, of the machine it is on."""


def show_rented() -> None:
    """Rented machines before anything is asked of them: one that is being taken back may not answer."""
    settings = load_settings()
    if settings.is_rented:
        show_machines(settings)


def show(cluster: OpenCluster) -> None:
    """Whether every node answers, whose data disk the head has, all runs with their state, the newest first."""
    head = cluster.head
    if cluster.nodes:
        answers = cluster.ask_all(BOOTED)
        rows = [[n.name, n.address, since(str(answers[n.name]))] for n in cluster.nodes]
        console().print(table(["node", "address", "state"], rows, {"state"}))
        if soon := under_notice(cluster):
            print(f"{who_goes(soon)}; when it is gone: {reclaim.ALL_AGAIN}")
        print(f"the head is {cluster.nodes[0].name}, {cluster.nodes[0].address}: fab ssh")
        if record := disk_record(head):
            print(f"/data on {head.name}: of the cluster {record.cluster}, generation {record.generation}")
    runs_table(runs.all_runs(head)[::-1])


def since(answer: str) -> str:
    """How long a node is up, by what it answers; an error as it is."""
    return f"up {length(seconds)}" if (seconds := figure_in(answer)) else answer
