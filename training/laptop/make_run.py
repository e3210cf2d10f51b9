"""A new run on a head, or one that goes on: its folder filled, its supervisor started."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from training.laptop import refusals, runs
from training.laptop.head_node import Head, HeadError
from training.laptop.open_cluster import OpenCluster
from training.laptop.ship import code_files, launch_files, pack
from training.laptop.starting import Turn, claim, drop, keep, remove_abandoned, turn
from training.launch import Launch


@contextmanager
def alone(cluster: OpenCluster) -> Iterator[Turn]:
    """Inside, nobody else starts anything on the head, no run is going on there, and what is started can stay: no node
    is about to be taken back, and the head's disk is this cluster's own. Raises LaunchError."""
    with turn(cluster.head) as mine:
        refusals.refuse_active(cluster.head)
        refusals.refuse_reclaimed(cluster)
        refusals.refuse_other_disk(cluster)
        remove_abandoned(cluster.head)
        yield mine


@contextmanager
def claimed(head: Head, name: str, now: datetime) -> Iterator[str]:
    """The id of a new run, whose folder is made; nothing of it is left where it was not started inside."""
    mine = claim(head, name, now)
    try:
        yield mine.run_id
    finally:
        with suppress(HeadError):  # the reason is being raised already
            drop(head, mine)


def start(head: Head, launch: Launch) -> None:
    """Start what is ready; that it is this side's turn was confirmed."""
    keep(head, launch.run_id)
    head.start(launch)


def start_ranks(
    cluster: OpenCluster,
    kind: str,
    now: datetime,
    module: str,
    *,
    files: Mapping[str, Path | str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Start ranks that are no training as trainings are started. `kind`: what their run id begins with."""
    head = cluster.head
    with alone(cluster) as mine, claimed(head, kind, now) as run_id:
        launch = cluster.launch(run_id, module)
        launch = replace(launch, env={**launch.env, **(env or {})})
        plan = {"run_id": run_id, "cluster": cluster.name, "hosts": [host.name for host in launch.hosts]}
        put_new(head, launch, {"plan.json": json.dumps(plan, indent=1) + "\n", **(files or {})})
        mine.confirm()
        start(head, launch)
    return launch


def put_new(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Ship code, data and metadata into a new run folder."""
    put(head, launch, {**code_files(), **launch_files(launch), **files})


def put_plan(head: Head, launch: Launch, plan: str) -> None:
    """The last files of a run that is ready to start: its plan, and its launch as that wants it."""
    put(head, launch, {"plan.json": plan, **launch_files(launch)})


def going_on(cluster: OpenCluster, run_id: str, force: bool) -> Launch:
    """How a run goes on from its newest checkpoint, on the nodes there are now."""
    head, old = cluster.head, runs.read_launch(cluster.head, run_id)
    launch = cluster.launch(run_id, old.module, ("--resume", *(["--force"] if force else [])))
    return replace(launch, stop_grace_s=old.stop_grace_s, hang_s=old.hang_s, spent_before=_spent(head, old, launch))


def put_again(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Today's code, the launch and `files` into the folder of a run that goes on."""
    head.shell(f"rm -rf {shlex.quote(launch.run_dir)}/training")
    put(head, launch, {**code_files(), **launch_files(launch), **files})


def _spent(head: Head, old: Launch, new: Launch) -> float:
    """What the starts of a run until now have cost, in the currency it goes on in."""
    if old.currency != new.currency:
        return 0.0
    so_far = runs.look(head, old.run_id).cost
    return old.spent_before if so_far is None else so_far


def put(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Some more files into a run's folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / f"spotune-{launch.run_id}.tar.gz"
        pack(files, archive)
        head.put(archive, Path(launch.run_dir))
