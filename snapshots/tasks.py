"""fab snapshots.create / list / prune, and fab rebuild."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from invoke import Collection, Context, Exit, task

import deploy
from deploy.tasks import doctor
from inventory.command_line import FAILURE, ask, say, sentences, yes_command
from inventory.errors import InventoryError
from inventory.renting.tasks import WAIT
from training.laptop.tasks import stop
from training.text.deferred import deferred

with deferred():
    from inventory import phases as timing
    from inventory import settings as cluster_toml
    from inventory.cloud import errors
    from inventory.renting import cost, ledger, members, recovery, report, tags
    from inventory.renting import disks as disk_plans
    from snapshots import create as creating
    from snapshots import listing, pruning, show
    from snapshots import rebuild as rebuilding
    from training.laptop import derived, follow, head_node, runs
    from training.models import names
    from training.run import launch

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.nodes import Node
    from inventory.settings import Settings

SNAPSHOT_HELP = "snapshot id, or latest"


def _rented() -> tuple[Settings, Cloud]:
    """The settings and the cloud they name. Raises SettingsError for a provider that has no snapshots."""
    settings = cluster_toml.load_settings()
    return settings, report.open_account(settings)


@task(
    auto_shortflags=False,
    help={
        "name": "name of the snapshot; default: cluster and run",
        "keep": "protect it from pruning, except prune --all",
        "stop_run": "stop an active run first, as fab stop does",
        "detach": "return as soon as the snapshot has begun",
    },
)
def create(c: Context, name: str = "", keep: bool = False, stop_run: bool = False, detach: bool = False) -> None:
    """Snapshot the head's data disk: environment, models, runs."""
    with sentences("interrupted; /data is not frozen. Whether a snapshot was begun: fab snapshots.list"):
        settings, cloud = _rented()
        creating.checked_name(name, settings.name, "")
        head = recovery.rented_nodes(cloud, settings)[0]
        _end_runs(c, head, stop_run)
        snapshot_id = creating.take(
            cloud, settings, head, name=name, keep=keep, packages=_program("keep_packages.py"), say=say
        )
        if detach or not listing.attended(cloud, snapshot_id):
            say("it continues on its own (fab snapshots.list); stop or release no machine before it is complete")
            return
    say(f"{snapshot_id} is complete; the machines may go: fab down. Back again: fab rebuild")


def _end_runs(c: Context, head: Node, stop_run: bool) -> None:
    """No run is going on when this returns. Raises RentError where one is and may not be stopped."""
    remote = head_node.RemoteHead(head)
    try:
        if run_id := runs.under_way(remote):
            raise errors.RentError(f"{runs.in_the_way(remote, run_id)}; nothing was made")
        for seen in runs.all_runs(remote):
            if seen.alive and not seen.active:
                follow.wait_for_reports(remote, seen.run_id)
            elif seen.active and stop_run:
                say(f"stopping {seen.run_id}")
                stop(c, run=seen.run_id)
            elif seen.active:
                raise errors.RentError(
                    f"{seen.run_id} is running on {head.name}; --stop-run stops it in order, or wait for its end"
                )
    finally:
        remote.close()


@task(name="list")
def list_snapshots(c: Context) -> None:
    """List the cluster's snapshots: size, age, price, contents."""
    with sentences("interrupted"):
        settings, cloud = _rented()
        if cluster_snapshots := listing.all_snapshots(cloud, settings):
            show.print_list(cluster_snapshots, cloud.disks(), _price(cloud, settings))
        else:
            say(f"no snapshots of cluster {settings.name!r} in {cloud.region_id}; make one: fab snapshots.create")


@task(
    auto_shortflags=False,
    help={
        "keep_last": "number of complete snapshots to keep",
        "all_": "all that no disk was created from, protected ones included",
        "others": "proceed even if some are tagged with another owner",
        "yes": "do not ask",
        "dry": "only show what would be deleted",
    },
)
def prune(
    c: Context, keep_last: int = 3, all_: bool = False, others: bool = False, yes: bool = False, dry: bool = False
) -> None:
    """Delete old snapshots; protected, used and the last complete one stay."""
    with sentences("interrupted; what is not deleted is still there: fab snapshots.list"):
        settings, cloud = _rented()
        everything, disks = listing.all_snapshots(cloud, settings), cloud.disks()
        way = "fab snapshots.prune --others takes them for yours"
        members.refuse_foreign(settings, everything, others, way)
        of_data = listing.of_data(everything)
        verdicts = pruning.all_unused(everything, disks) if all_ else pruning.prune(of_data, disks, keep_last)
        show.print_verdicts(verdicts, _price(cloud, settings))
        going = pruning.going(verdicts)
        if going:
            if dry:
                return
            again = yes_command("snapshots.prune", prune, keep_last=keep_last, all_=all_, others=others)
            ask(yes, pruning.question(verdicts), again)
            pruning.delete(cloud, going, say)
        for line in pruning.what_is_left(verdicts, everything=all_):
            say(line)


@task(
    auto_shortflags=False,
    help={
        "snapshot": SNAPSHOT_HELP,
        "nodes": "number of machines; default: as in cluster.toml",
        "hours": "rental time in hours; default: as in cluster.toml",
        "model": "recipe whose base model is read first; default: that of the newest run",
        "others": "proceed even if machines or disks are tagged with another owner",
        "wait": WAIT,
        "dry": "only show the steps",
        "yes": "do not ask",
    },
)
def rebuild(
    c: Context,
    snapshot: str = "latest",
    nodes: str = "",  # as text, so that 0 is refused and not taken for nothing
    hours: float = 0.0,
    model: str = "",
    others: bool = False,
    wait: bool = False,
    dry: bool = False,
    yes: bool = False,
) -> None:
    """Restore the cluster from a snapshot: machines, disks, deploy, doctor."""
    with sentences("interrupted; fab rebuild goes on, fab down removes what was made"):
        wanted = rebuilding.machines_asked(nodes)
        phases = timing.Phases()
        folder = _model_folder(model) if model else ""
        settings, cloud = _rented()
        known = [_model_folder(name) for name in settings.models.names]
        notes = derived.notes_on(settings.models.names)
        with phases.phase("plan"):
            planned = partial(rebuilding.planned, cloud, settings, snapshot, wanted, hours, others=others)
            plan = disk_plans.when_free(planned, wait, cloud)
        show.print_rebuild(plan)
        for note in notes:
            say(note)
        if dry or not plan.steps:
            return
        flags = {"snapshot": snapshot, "nodes": nodes, "hours": hours, "model": model, "others": others}
        again = yes_command("rebuild", rebuild, **flags)
        with phases.phase("your answer"):
            ask(yes, "do that?", again)
        try:
            rebuilding.Rebuilding(cloud, settings, plan, folder, known, lambda: _doctor(c), say, phases).do_all()
        finally:
            show.print_phases(phases.in_order(), phases.total_s())
            phases.write(tags.StateFiles.of(settings.name).phases)
    say(rebuilding.next_step(_trainings(cloud, settings)))


def _trainings(cloud: Cloud, settings: Settings) -> list[tuple[str, str]] | None:
    """The trainings on the head that have a checkpoint, and their states, the oldest first; None where it does
    not tell."""

    try:
        with closing(head_node.RemoteHead(recovery.rented_nodes(cloud, settings)[0])) as head:
            learned = runs.with_checkpoint(head)
            trainings = [
                seen for seen in runs.all_runs(head) if runs.is_training(seen.run_id) and seen.run_id in learned
            ]
            return [(seen.run_id, seen.state) for seen in trainings]
    except (InventoryError, head_node.HeadError, launch.LaunchError, OSError):
        return None  # the rebuild is done all the same; then both ways on are said


def _price(cloud: Cloud, settings: Settings) -> cost.SnapshotPrice:
    return cost.SnapshotPrice(settings.rental.snapshot_price_gib_month, ledger.Ledger.of(cloud, settings).currency)


def _program(name: str) -> Path:
    """A program of deploy's that a node runs."""
    return Path(deploy.__file__).parent / "on_node" / name


def _model_folder(name: str) -> str:
    return names.resolve(name).place


def _doctor(c: Context) -> None:
    try:
        doctor(c)
    except Exit:
        raise Exit("the doctor found something broken; fix it as described, then: fab doctor", FAILURE) from None


snapshots = Collection("snapshots", create, list_snapshots, prune)
namespace = Collection(snapshots, rebuild)
