"""Before the ranks start: every node answers and has the run's code and data, and none of an earlier try is left."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from training.began_with import FOLDER as BEGAN_WITH
from training.launch import NO_DATA_DISK, Host, Launch, sweep_command
from training.node.diagnosis.on_rank import FOLDER as PROGRESS
from training.node.supervision.end_processes import sweep
from training.node.supervision.node_ssh import on_hosts, output_of, ssh
from training.run_folder import CHECKPOINTS, HANG, PROFILE, STATUS, STOP
from training.starts import STARTS

RESERVE = ".reserve"
"""File in the run folder that makes room for the last status on a full disk."""
ROOM_BYTES = 16 << 20
"""Less on a node is a full disk: code, prepared data and a rank's log go there."""
OF_THE_HEAD = (
    *("logs", CHECKPOINTS, STATUS, "metrics.jsonl", STOP, RESERVE, PROGRESS, PROFILE, HANG),
    *("tb", "wandb", "report.html", "report-facts.json", "versions.json", "after", "merged", BEGAN_WITH, STARTS),
)
"""What the other nodes do not get of a run folder."""


def ready(launch: Launch) -> None:
    """Make all nodes ready, each step on all of them at once. Raises NodeError for the first that is not."""
    if launch.here:
        sweep(launch.run_dir)
        return
    for step in (_make_folder, _ship, _sweep):
        errors = on_hosts(launch.hosts, partial(step, launch))
        if errors:
            raise errors[0]


def _make_folder(launch: Launch, host: Host) -> None:
    room = shlex.quote(f"{launch.run_dir}/logs/{RESERVE}")  # rsync may end without a word of a full disk
    make = f"mkdir -p {shlex.quote(launch.run_dir)}/logs"
    if disk := launch.data_disk:
        runs = Path(launch.run_dir).parent
        cache = shlex.quote(
            str(runs.parent / "cache")
        )  # data that were prepared, as those of runs nobody else's to read
        make += f" && chmod 700 {shlex.quote(str(runs))} && {{ [ ! -d {cache} ] || chmod 700 {cache}; }}"
        missing = shlex.quote(NO_DATA_DISK.format(disk=disk, deploy=launch.deploy))
        make = f"mountpoint -q {shlex.quote(disk)} || {{ echo {missing} >&2; exit 1; }}; {make}"
    ssh(host.name, f"{make} && {{ head -c {ROOM_BYTES} /dev/zero >{room}; }}; end=$?; rm -f {room}; exit $end", 8)


def _ship(launch: Launch, host: Host) -> None:
    if host == launch.hosts[0]:
        return
    excluded = [f"--exclude=/{name}" for name in OF_THE_HEAD]
    source, target = f"{launch.run_dir}/", f"{host.name}:{launch.run_dir}/"
    # what is shipped to the head has no time of its own: a recipe of the same size would pass for the old one
    for options in (["--checksum", "--exclude=/data"], []):
        output_of(["rsync", "-a", "--timeout=20", *options, *excluded, source, target], host.name, 600)
    # a run that goes on with other code must not find modules of its former one
    argv = ["rsync", "-a", "--timeout=20", "--delete", f"{source}training/", f"{target}training/"]
    output_of(argv, host.name, 600)


def _sweep(launch: Launch, host: Host) -> None:
    ssh(host.name, sweep_command(launch), 30)
