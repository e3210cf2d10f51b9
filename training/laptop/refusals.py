"""Why nothing may be started on a head now."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from inventory.shown import clock
from training import reclaim
from training.bounded import figure_in
from training.laptop import runs
from training.laptop.head_node import Head
from training.laptop.open_cluster import OpenCluster
from training.laptop.starting import in_the_way, under_way
from training.launch import LaunchError
from training.lineage import RECORD, DiskRecord, parse_record


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


def under_notice(cluster: OpenCluster) -> list[reclaim.Notice]:
    """The nodes of which the cloud has said that it takes them back, as the head knows; the soonest first."""
    if cluster.head.here:
        return []
    answer = cluster.head.shell(
        f"date +%s; for f in {reclaim.FOLDER}/*.json; do cat $f && echo; done 2>/dev/null; true"
    )
    now, *lines = answer.splitlines()
    return reclaim.pending(reclaim.parse_notices(lines), [node.name for node in cluster.nodes], figure_in(now))


def who_goes(notices: Sequence[reclaim.Notice]) -> str:
    """Which machines go and when, by this machine's clock."""
    return reclaim.words(notices, lambda at: clock(datetime.fromtimestamp(at, UTC)))


def refuse_reclaimed(cluster: OpenCluster) -> None:
    """LaunchError where the cloud has said that it takes one of these nodes back: a run would be ended at once."""
    if soon := under_notice(cluster):
        without_head = cluster.head.name in {notice.node for notice in soon}
        way = (
            f"when it is gone: {reclaim.ALL_AGAIN}, then this command again"
            if without_head
            else "when it is gone, this command starts on the machines that are left; "
            f"to start on all of them, first: {reclaim.ALL_AGAIN}"
        )
        raise LaunchError(f"{who_goes(soon)}: nothing is started; {way}")


def refuse_other_disk(cluster: OpenCluster) -> None:
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
    return parse_record(head.shell(f"cat {shlex.quote(str(head.runs.parent / RECORD))} 2>/dev/null; true"))
