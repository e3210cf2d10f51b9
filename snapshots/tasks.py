"""fab snapshots.create / list / prune, and fab rebuild."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from invoke import Collection, Context, Exit, task

from inventory.command_line import FAILURE, ask, say, sentences, yes_command

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.nodes import Node
    from inventory.renting.cost import SnapshotPrice
    from inventory.settings import Settings

SNAPSHOT_HELP = "snapshot id, or latest: the newest of this cluster"


def _rented() -> tuple[Settings, Cloud]:
    """The settings and the cloud they name. Raises SettingsError for a provider that has no snapshots."""
    from inventory.cloud.opening import open_cloud
    from inventory.settings import RENTED, SettingsError, load_settings

    settings = load_settings()
    if not settings.is_rented:
        known = " or ".join(f'"{name}"' for name in RENTED)
        raise SettingsError(
            f'cluster.toml says provider = "{settings.provider}"; snapshots are of rented disks: provider = {known}'
        )
    return settings, open_cloud(settings)


@task(
    auto_shortflags=False,
    help={
        "name": "what it is called; without it cluster and run",
        "keep": "no prune deletes it but prune --all",
        "stop_run": "stop a run that is going on, in order, as fab stop does",
        "detach": "come back as soon as it is begun",
    },
)
def create(c: Context, name: str = "", keep: bool = False, stop_run: bool = False, detach: bool = False) -> None:
    """Keep the head's data disk as it is now: environment, models, runs."""
    with sentences("interrupted; /data is not frozen. Whether a snapshot was begun: fab snapshots.list"):
        from inventory.renting.recovery import rented_nodes
        from snapshots.create import checked_name, take
        from snapshots.listing import attended

        settings, cloud = _rented()
        checked_name(name, settings.name, "")
        head = rented_nodes(cloud, settings)[0]
        _end_runs(c, head, stop_run)
        snapshot_id = take(cloud, settings, head, name=name, keep=keep, packages=_program("keep_packages.py"), say=say)
        if detach or not attended(cloud, snapshot_id):
            say("it goes on by itself: fab snapshots.list; stop or release no machine before it is complete")
            return
    say(f"{snapshot_id} is complete; the machines may go: fab down. Back again: fab rebuild")


def _end_runs(c: Context, head: Node, stop_run: bool) -> None:
    """No run is going on when this returns. Raises RentError where one is and may not be stopped."""
    from inventory.cloud.errors import RentError
    from training.laptop import runs, starting
    from training.laptop.head_node import RemoteHead
    from training.laptop.tasks import stop

    remote = RemoteHead(head)
    try:
        if run_id := starting.under_way(remote):
            raise RentError(f"{starting.in_the_way(remote, run_id)}; nothing was made")
        for seen in runs.all_runs(remote):
            if seen.alive and not seen.active:
                runs.wait_for_reports(remote, seen.run_id)
            elif seen.active and stop_run:
                say(f"stopping {seen.run_id}")
                stop(c, run=seen.run_id)
            elif seen.active:
                raise RentError(
                    f"{seen.run_id} is running on {head.name}; --stop-run stops it in order, or wait for its end"
                )
    finally:
        remote.close()


@task(name="list")
def list_snapshots(c: Context) -> None:
    """The cluster's snapshots: size, age, price, what is inside."""
    with sentences("interrupted"):
        from snapshots import listing, show

        settings, cloud = _rented()
        if found := listing.all_snapshots(cloud, settings):
            show.print_list(found, cloud.disks(), _price(cloud, settings))
        else:
            say(f"no snapshots of cluster {settings.name!r} in {cloud.region_id}; make one: fab snapshots.create")


@task(
    auto_shortflags=False,
    help={
        "keep_last": "how many whole snapshots stay",
        "all_": "every one that no disk was made from, those made with --keep too",
        "others": "although some are another owner's, by their tag",
        "yes": "do not ask",
        "dry": "only say what would go",
    },
)
def prune(
    c: Context, keep_last: int = 3, all_: bool = False, others: bool = False, yes: bool = False, dry: bool = False
) -> None:
    """Delete old snapshots; none kept or in use, nor the last whole one."""
    with sentences("interrupted; what is not deleted is still there: fab snapshots.list"):
        from inventory.renting import members
        from snapshots import listing, pruning, show

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
        "nodes": "how many machines; without it as cluster.toml says",
        "hours": "for how long; without it as cluster.toml says",
        "model": "recipe whose base model is read first; without it the newest run's",
        "others": "although machines or disks of the cluster are another owner's, by their tag",
        "dry": "only show the steps, and what a snapshot brings back",
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
    dry: bool = False,
    yes: bool = False,
) -> None:
    """Bring the cluster back from a snapshot: machines, deploy, disks, doctor."""
    with sentences("interrupted; fab rebuild goes on, fab down removes what was made"):
        from inventory.phases import Phases
        from inventory.renting.state_files import StateFiles
        from snapshots import show
        from snapshots.rebuild import Rebuilding, machines_asked, next_step, planned
        from training.laptop.models.wanted import perhaps_sent, short_names

        wanted = machines_asked(nodes)
        phases = Phases()
        folder = _model_folder(model) if model else ""
        settings, cloud = _rented()
        known = [_model_folder(name) for name in settings.models.names]
        notes = short_names(settings.models.names) + perhaps_sent(settings.models.names)
        with phases.phase("plan"):
            plan = planned(cloud, settings, snapshot, wanted, hours, others=others)
        show.print_rebuild(plan)
        for note in notes:
            say(note)
        if dry:
            show.print_where_things_live()
        if dry or not plan.steps:
            return
        flags = {"snapshot": snapshot, "nodes": nodes, "hours": hours, "model": model, "others": others}
        again = yes_command("rebuild", rebuild, **flags)
        with phases.phase("your answer"):
            ask(yes, "do that?", again)
        try:
            Rebuilding(cloud, settings, plan, folder, known, lambda: _doctor(c), say, phases).do_all()
        finally:
            show.print_phases(phases.in_order(), phases.total_s())
            phases.write(StateFiles.of(settings.name).phases)
    say(next_step(_trainings(cloud, settings)))


def _trainings(cloud: Cloud, settings: Settings) -> list[tuple[str, str]] | None:
    """The trainings on the head that have a checkpoint, and their states, the oldest first; None where it does
    not tell."""
    from contextlib import closing

    from inventory.errors import InventoryError
    from inventory.renting.recovery import rented_nodes
    from training.laptop import runs
    from training.laptop.head_node import HeadError, RemoteHead
    from training.launch import LaunchError

    try:
        with closing(RemoteHead(rented_nodes(cloud, settings)[0])) as head:
            learned = runs.with_checkpoint(head)
            trainings = [seen for seen in runs.all_runs(head) if runs.trains(seen.run_id) and seen.run_id in learned]
            return [(seen.run_id, seen.state) for seen in trainings]
    except (InventoryError, HeadError, LaunchError, OSError):
        return None  # the rebuild is done all the same; then both ways on are said


def _price(cloud: Cloud, settings: Settings) -> SnapshotPrice:
    from inventory.renting.cost import SnapshotPrice
    from inventory.renting.ledger import Ledger

    return SnapshotPrice(settings.rental.snapshot_price_gib_month, Ledger.of(cloud, settings).currency)


def _program(name: str) -> Path:
    """A program of deploy's that a node runs."""
    import deploy

    return Path(deploy.__file__).parent / "on_node" / name


def _model_folder(name: str) -> str:
    from training.model_names import named_model

    return named_model(name).folder


def _doctor(c: Context) -> None:
    """Warnings are shown and are no failure; what is broken is."""
    from deploy.tasks import doctor

    try:
        doctor(c)
    except Exit as ended:
        if ended.code != 1 or ended.message:
            raise Exit("the doctor found something broken; mend it as it says, then: fab doctor", FAILURE) from None


snapshots = Collection("snapshots", create, list_snapshots, prune)
namespace = Collection(snapshots, rebuild)
