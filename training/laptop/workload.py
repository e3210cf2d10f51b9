"""What `fab up`, `down`, `snapshots.create` and `rebuild` ask of models and runs: inventory/renting/workload.py,
answered by what the head says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from inventory.command_line import say
from inventory.errors import InventoryError
from inventory.shown import clock
from training.text.deferred import deferred

with deferred():
    from inventory import cluster as clusters
    from inventory.cloud import errors
    from inventory.renting import members, recovery
    from inventory.renting.workload import RunState
    from training.laptop import (
        at_risk,
        derived,
        fetch,
        follow,
        head_node,
        lost_machines,
        open_cluster,
        rental,
        resume_run,
        run_news,
        runs,
    )
    from training.laptop.on_head import fs
    from training.models import names
    from training.run import folder as run_folder
    from training.run import launch

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.nodes import Node
    from inventory.renting.down import DownPlan
    from inventory.settings import Settings
    from training.laptop.at_risk import RunsAtRisk


class TrainingWorkload:
    """Implements NodeWorkload: what runs on the machines is trainings."""

    def refuse_unknown(self, models: Sequence[str]) -> list[str]:
        return derived.refuse_unknown(models)

    def refuse_incomplete(self, models: Sequence[str], *, sent_before: bool) -> None:
        derived.refuse_incomplete(models, sent_before=sent_before)

    def notes_on(self, models: Sequence[str]) -> list[str]:
        return derived.notes_on(models)

    def model_folder(self, model: str) -> str:
        return names.resolve(model).place

    def stays_on(self) -> str:
        return _asked_head()[0].stays_on

    def lost_with(
        self, plan: DownPlan, *, named: bool, agreed: bool, force: bool, stop_run: bool = False
    ) -> tuple[list[str], str]:
        everything = members.members((*plan.machines, *plan.remaining))
        by_name = dict(zip(members.names(everything), everything, strict=True))
        going = {name for name, each in by_name.items() if each in plan.machines}
        head = by_name.get(members.HEAD)
        on_head, silence = _asked_head() if head else (None, "")
        stake = on_head or at_risk.RunsAtRisk()  # no run outlives its head
        stopping = stake.active if stop_run and stake.hosts & going else ""

        running = [] if stopping else [*stake.running_on(going)]
        on_disk, unknown = _lost_with_disk(plan, on_head, silence)
        silent = bool(head and silence and going and not head.is_stopped)
        not_answered = [f"whether a run is going on there is not known: {silence}"] if silent else []
        unfetched = [stake.left_on(members.HEAD)] if members.HEAD in going and stake.unfetched else []

        losses = [*running, *on_disk, *not_answered, *(unfetched if named else [])]
        if losses and (named or agreed) and not force:
            raise errors.RentError(f"{'; '.join(losses)}; nothing was deleted (--force: all the same)")
        return [*losses, *([] if named else unfetched), *unknown], stopping

    def stop(self, run_id: str) -> None:
        with open_cluster.open_cluster(here=False) as cluster:
            follow.stop(cluster, run_id)
            rental.shorten_idle_lease(cluster)

    def end_all(self, head: Node, *, stop_run: bool) -> None:
        with closing(head_node.RemoteHead(head)) as remote:
            if run_id := runs.under_way(remote):
                raise errors.RentError(f"{runs.in_the_way(remote, run_id)}; nothing was made")
            for seen in runs.all_runs(remote):
                if seen.alive and not seen.active:
                    follow.wait_for_reports(remote, seen.run_id)
                elif seen.active and stop_run:
                    say(f"stopping {seen.run_id}")
                    self.stop(seen.run_id)
                elif seen.active:
                    raise errors.RentError(
                        f"{seen.run_id} is running on {head.name}; --stop-run stops it in order, or wait for its end"
                    )

    def tell_release(self, head: Node, at: datetime) -> str:
        try:
            with closing(head_node.RemoteHead(head)) as remote:
                rental.tell_release(remote, at)
        except head_node.HeadError as error:
            return str(error)
        return ""

    def run_state(self, cloud: Cloud, settings: Settings, run_id: str) -> RunState | str:
        if run_id and not run_folder.is_run_id(run_id):
            raise errors.RentError(f"{run_id!r} is no run id like tiny-20260131-154500")
        try:
            with closing(head_node.RemoteHead(recovery.rented_nodes(cloud, settings)[0])) as head:
                run_id = run_id or runs.active(head)
                if not run_id or not runs.is_training(run_id):
                    return f"no training is going on on {head.name}; fab keep --run names one that is to go on"
                if not head.ask(fs.exists, head.runs / run_id):
                    return RunState(run_id, reason=f"{run_id} is not on the disk of {head.name}")
                seen, hosts = runs.look(head, run_id), runs.read_launch(head, run_id).hosts
                nodes, step = len(lost_machines.nodes_of(head, run_id)), runs.newest_checkpoint(head, run_id)
        except (InventoryError, head_node.HeadError, launch.LaunchError, OSError) as error:
            return str(error)
        lost = seen.state == "lost" or bool(seen.status and seen.status.cause.kind in follow.LOSSES)
        reason = f"{run_id} {seen.state}{seen.reason and f': {seen.reason}'}"
        return RunState(
            run_id,
            reason,
            is_active=seen.active,
            is_finished=seen.state == "finished",
            is_stopped=seen.state == "stopped" and not lost,
            lacks_machines=lost and not seen.active,
            addresses=frozenset(host.private_address for host in hosts),
            nodes=nodes,
            step=step,
            news=tuple(run_news.messages(seen)),
        )

    def go_on(self, run_id: str) -> None:
        with open_cluster.open_cluster(here=False) as cluster:
            resume_run.resume(cluster, run_id, "", {}, force=False)

    def fetch(self, run_id: str) -> None:
        with open_cluster.open_cluster(here=False) as cluster:
            fetch.collect_results(cluster.head, run_id)

    def leave_idle(self) -> None:
        try:
            with open_cluster.open_cluster(here=False) as cluster:
                rental.shorten_idle_lease(cluster)
        except Exception as error:  # whoever kept them ends all the same
            say(f"the machines stay as planned: {error}")

    def trainings(self, cloud: Cloud, settings: Settings) -> list[tuple[str, str]] | None:
        try:
            with closing(head_node.RemoteHead(recovery.rented_nodes(cloud, settings)[0])) as head:
                learned = runs.with_checkpoint(head)
                return [
                    (seen.run_id, seen.state)
                    for seen in runs.all_runs(head)
                    if runs.is_training(seen.run_id) and seen.run_id in learned
                ]
        except (InventoryError, head_node.HeadError, launch.LaunchError, OSError):
            return None  # the rebuild is done all the same; then both ways on are said


def _asked_head() -> tuple[RunsAtRisk, str]:
    """What the head says of its runs; why it says nothing."""
    try:
        with closing(head_node.RemoteHead(clusters.load_cluster().head)) as head:
            return at_risk.at_stake(head, run_folder.LOCAL_RUNS), ""
    except Exception as error:  # the runs' files are a node's words: whatever fails at them stops no `fab down`
        return at_risk.RunsAtRisk(), str(error) or type(error).__name__


def _lost_with_disk(plan: DownPlan, stake: RunsAtRisk | None, silence: str) -> tuple[list[str], list[str]]:
    """What runs lose with the head's data disk if that goes and no snapshot has it, and what is not known of that: a
    sentence each. `stake`: what the head says; None without a head: then only what was fetched is known."""
    going = [disk for disk in plan.disks if members.disk_number(disk) == 1]
    if not going:
        return [], []
    whole = [each.created for each in plan.snapshots if each.disk_kind == "data" and each.status == "accomplished"]
    disk, held = f"{members.HEAD}'s disk", max(whole).timestamp() if whole else 0.0
    try:
        if silence:
            raise head_node.HeadError(silence)
        since = min(each.created for each in going).timestamp()
        unfinished = at_risk.left_behind(run_folder.LOCAL_RUNS, since) if stake is None else stake.unfinished
        losses, unknown = [*at_risk.lost_with(disk, unfinished, held, head_is_there=stake is not None)], []
    except Exception as error:  # as above
        losses, unknown = [], [f"what of its runs is only on {disk} is not known: {str(error) or type(error).__name__}"]
    return losses, unknown if stake else [*unknown, *_saved_since(plan, disk, held)]


def _saved_since(plan: DownPlan, disk: str, held: float) -> list[str]:
    """That a disk, whose head is gone, may have more than its newest snapshot of that time, in seconds since 1970."""
    if plan.head_gone is None or plan.head_gone.timestamp() <= held:
        return []
    newest = f"the newest snapshot is of {clock(datetime.fromtimestamp(held, UTC))}" if held else "no snapshot has any"
    until = f"{members.HEAD} was there until {clock(plan.head_gone)} at the latest, {newest}"
    return [f"{until}: what runs saved in between is only on {disk} and is lost with it; {at_risk.KEEP_DISK}"]
