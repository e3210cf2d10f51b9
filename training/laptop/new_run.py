"""A new run on a head, or one that goes on: why it may not start, what it ships, its supervisor started."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inventory.shown import clock
from training.laptop import rental, runs
from training.laptop.follow import print_detached
from training.laptop.head_node import Head, HeadError
from training.laptop.on_head import fs, machines
from training.laptop.open_cluster import Session
from training.laptop.starting import (
    StartLock,
    discard_run,
    hold_start_lock,
    in_the_way,
    remove_abandoned,
    reserve_run_id,
    under_way,
)
from training.run import notices as reclaim
from training.run.folder import LAUNCH, PLAN
from training.run.launch import Launch, LaunchError, deepspeed_env, hostfile, launch_text
from training.run.notices import RECORD, DiskRecord, parse_record
from training.text.problems import FAILED


def refuse_second(head: Head) -> None:
    """LaunchError where a run is going on or about to: two would share GPUs and ports."""
    if run_id := under_way(head):
        raise LaunchError(in_the_way(head, run_id))
    refuse_active(head)


def refuse_active(head: Head) -> None:
    """LaunchError where a run is going on."""
    if run_id := runs.active(head):
        raise LaunchError(f"{run_id} is running on {head.name}; {wait_or_end(head, run_id)}")


def refuse_unfinished(head: Head, run_id: str, instead: str) -> None:
    """LaunchError where this run is going on: what it has learned by now is not yet what it will have. `instead`: what
    is possible meanwhile."""
    if runs.look(head, run_id).active:
        raise LaunchError(f"{run_id} is running on {head.name}; {wait_or_end(head, run_id)}; {instead}")


def wait_or_end(head: Head, run_id: str) -> str:
    """What to do about a run that is in the way."""
    return f"wait for it, or end it with: fab stop --run {run_id}{' --here' * head.here}"


MOST_NOTICES = 100


def under_notice(cluster: Session) -> list[reclaim.Notice]:
    """The nodes of which the cloud has said that it takes them back, as the head knows; the soonest first."""
    if cluster.head.here:
        return []
    head, nodes = cluster.head, [node.name for node in cluster.nodes]
    told = head.ask(fs.newest_texts, reclaim.FOLDER, "*.json", MOST_NOTICES)
    return reclaim.pending(reclaim.parse_notices(told), nodes, head.ask(machines.now))


def who_goes(notices: Sequence[reclaim.Notice]) -> str:
    """Which machines go and when, by this machine's clock."""
    return reclaim.words(notices, lambda at: clock(datetime.fromtimestamp(at, UTC)))


class MachineAway(LaunchError):
    """A machine that a run would use is stopped, or the cloud takes it back."""

    exit_code = FAILED


def refuse_leaving(cluster: Session) -> None:
    """MachineAway where a node is stopped, or the cloud has said that it takes it back: a run would end at once."""
    if stopped := ", ".join(node.name for node in cluster.nodes if node.stopped):
        raise MachineAway(f"stopped: {stopped}; fab up starts what is stopped")
    if soon := under_notice(cluster):
        without_head = cluster.head.name in {notice.node for notice in soon}
        way = (
            f"when it is gone: {reclaim.ALL_AGAIN}, then this command again"
            if without_head
            else "when it is gone, this command starts on the machines that are left; "
            f"to start on all of them, first: {reclaim.ALL_AGAIN}"
        )
        raise MachineAway(f"{who_goes(soon)}: nothing is started; {way}")


def refuse_other_disk(cluster: Session) -> None:
    """LaunchError where the head's /data is another cluster's, or not on the disk it was on at the last base deploy."""
    head = cluster.head
    if head.here or (record := disk_record(head)) is None:
        return
    deploy = f"run the base deploy: {cluster.deploy}"
    if record.cluster != cluster.name:
        raise LaunchError(f"/data on {head.name} is of the cluster {record.cluster!r}, not {cluster.name!r}; {deploy}")
    if cluster.disk and record.disks[-1] != cluster.disk:
        raise LaunchError(
            f"{head.name} has the data disk {cluster.disk}, but its /data is set up as {record.disks[-1]}; {deploy}"
        )


def disk_record(head: Head) -> DiskRecord | None:
    """Whose data disk the head has; None where it does not say."""
    return parse_record(head.ask(fs.text, head.runs.parent / RECORD) or "")


SOURCE = Path(__file__).parents[1]
STAYS = "laptop"
"""The folder that no node needs."""
SHIPPED_SUFFIXES = {".py", ".toml", ".jinja", ".json"}


def code_files(source: Path = SOURCE) -> dict[str, Path]:
    """Our own training code, by its place in the run folder."""
    return {
        f"training/{path.relative_to(source)}": path
        for path in sorted(source.rglob("*"))
        if path.suffix in SHIPPED_SUFFIXES
        and "__pycache__" not in path.parts
        and path.relative_to(source).parts[0] != STAYS
    }


def launch_files(launch: Launch) -> dict[str, str]:
    """How the run is started; written anew by a resume, which may have other nodes."""
    return {
        LAUNCH: launch_text(launch),
        "hostfile": hostfile(launch.hosts),
        ".deepspeed_env": deepspeed_env(launch.env),
    }


def plan_text(
    launch: Launch, model_dir: str, base_model_hash: str, data: Mapping[str, Any], predicted: Mapping[str, Any]
) -> str:
    """plan.json: what the run was meant to be, to hold its results against."""
    plan = {
        "run_id": launch.run_id,
        "world_size": launch.world_size,
        "hosts": [asdict(host) for host in launch.hosts],
        "model_dir": model_dir,
        "base_model_hash": base_model_hash,
        "data": dict(data),
        "predicted": dict(predicted),
    }
    return json.dumps(plan, indent=1) + "\n"


def pack(files: Mapping[str, Path | str], archive: Path) -> None:
    """Write files, given as paths or texts by their place in the run folder, into one tar; with their times."""
    now = int(time.time())
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o644
            info.mtime = now
            if isinstance(content, Path):
                about = content.stat()
                info.size, info.mtime = about.st_size, int(about.st_mtime)
                with content.open("rb") as file:
                    tar.addfile(info, file)
            else:
                data = content.encode()
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@contextmanager
def start_lock(cluster: Session) -> Iterator[StartLock]:
    """Inside, nobody else starts anything on the head, no run is going on there, and what is started can stay: no node
    is about to be taken back, and the head's disk is this cluster's own. After Ctrl-C it is said that what was started
    goes on, or that nothing was. Raises LaunchError."""
    with hold_start_lock(cluster.head) as lock:
        refuse_active(cluster.head)
        refuse_leaving(cluster)
        refuse_other_disk(cluster)
        remove_abandoned(cluster.head)
        try:
            yield lock
        except KeyboardInterrupt:
            if lock.started:
                print_detached(lock.started, cluster.head.here)
            else:
                print("nothing was started", flush=True)
                rental.print_release_time(cluster, goes_on=False)
            raise


@contextmanager
def new_run_folder(head: Head, name: str, now: datetime) -> Iterator[str]:
    """The id of a new run, whose folder is made; nothing of it is left where it was not started inside."""
    mine = reserve_run_id(head, name, now)
    try:
        yield mine.run_id
    finally:
        with suppress(HeadError):  # the reason is being raised already
            discard_run(head, mine)


def start_ranks(
    cluster: Session,
    kind: str,
    now: datetime,
    module: str,
    *,
    files: Mapping[str, Path | str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Start ranks that are no training as trainings are started. `kind`: what their run id begins with."""
    head = cluster.head
    with start_lock(cluster) as lock, new_run_folder(head, kind, now) as run_id:
        launch = cluster.launch(run_id, module)
        launch = replace(launch, env={**launch.env, **(env or {})})
        plan = {"run_id": run_id, "cluster": cluster.name, "hosts": [host.name for host in launch.hosts]}
        upload_new_run(head, launch, {PLAN: json.dumps(plan, indent=1) + "\n", **(files or {})})
        lock.start(launch)
    return launch


def upload_new_run(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Ship code, data and metadata into a new run folder."""
    upload(head, launch, {**code_files(), **launch_files(launch), **files})


def resumed_launch(cluster: Session, run_id: str, force: bool) -> Launch:
    """How a run goes on from its newest checkpoint, on the nodes there are now."""
    head, old = cluster.head, runs.read_launch(cluster.head, run_id)
    launch = cluster.launch(run_id, old.module, ("--resume", *(["--force"] if force else [])))
    return replace(launch, stop_grace_s=old.stop_grace_s, hang_s=old.hang_s, spent_before=_spent(head, old, launch))


def upload_resumed(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Today's code, the launch and `files` into the folder of a run that goes on."""
    head.ask(fs.remove, f"{launch.run_dir}/training")
    upload(head, launch, {**code_files(), **launch_files(launch), **files})


def _spent(head: Head, old: Launch, new: Launch) -> float:
    """What the starts of a run until now have cost, in the currency it goes on in."""
    if old.currency != new.currency:
        return 0.0
    so_far = runs.look(head, old.run_id).cost
    return old.spent_before if so_far is None else so_far


def upload(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Some more files into a run's folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / f"spotune-{launch.run_id}.tar.gz"
        pack(files, archive)
        head.put(archive, Path(launch.run_dir))
