"""fab snapshots.create / list / prune, and fab rebuild."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from invoke import Collection, Context, Exit, task

from inventory.command_line import FAILURE, ask, say, sentences, yes_command
from inventory.renting.tasks import WAIT
from training.text.deferred import deferred
from training.text.problems import STOPPED

with deferred():
    from inventory import notify
    from inventory import phases as timing
    from inventory import settings as cluster_toml
    from inventory.cloud import opening
    from inventory.ending_signals import signals_as_ctrl_c
    from inventory.renting import cost, keeper, ledger, members, recovery, report, tags
    from inventory.renting import disks as disk_plans
    from inventory.renting.workload import RunState
    from snapshots import create as creating
    from snapshots import keep as keeping
    from snapshots import listing, pruning, service, show
    from snapshots import rebuild as rebuilding

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.renting.workload import NodeWorkload
    from inventory.settings import Settings

REPLACEMENTS = 4
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
    workload: NodeWorkload = c.spotune.workload
    with sentences("interrupted; /data is not frozen. Whether a snapshot was begun: fab snapshots.list"):
        settings, cloud = _rented()
        creating.checked_name(name, settings.name, "")
        head = recovery.rented_nodes(cloud, settings)[0]
        workload.end_all(head, stop_run=stop_run)
        snapshot_id = creating.take(
            cloud, settings, head, name=name, keep=keep, packages=c.spotune.keep_packages, say=say
        )
        if detach or not listing.attended(cloud, snapshot_id):
            say("it continues on its own (fab snapshots.list); stop or release no machine before it is complete")
            return
    say(f"{snapshot_id} is complete; the machines may go: fab down. Back again: fab rebuild")


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
    workload: NodeWorkload = c.spotune.workload
    with sentences("interrupted; fab rebuild goes on, fab down removes what was made"):
        wanted = rebuilding.machines_asked(nodes)
        phases = timing.Phases()
        folder = workload.model_folder(model) if model else ""
        settings, cloud = _rented()
        known = [workload.model_folder(name) for name in settings.models.names]
        notes = workload.notes_on(settings.models.names)
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
    say(rebuilding.next_step(workload.trainings(cloud, settings)))


@task(
    auto_shortflags=False,
    help={
        "run": "run to keep; default: the one that is going on",
        "replacements": "number of machines that may be ordered",
        "list_price": "order at the list price if there is no spot machine",
        "install": "keep them as a systemd service of this machine, without a terminal",
        "yes": "do not ask",
    },
)
def keep(
    c: Context,
    run: str = "",
    replacements: int = REPLACEMENTS,
    list_price: bool = False,
    install: bool = False,
    yes: bool = False,
) -> None:
    """Replace the machines of a run that are taken back; the run continues."""
    workload: NodeWorkload = c.spotune.workload
    with sentences("no longer kept: the run continues as long as its machines; again: fab keep"):
        settings, cloud = _rented()
        with keeper.alone(settings.name), closing(notify.open_notifier(settings, say)) as notifier:
            machines = members.usable(cloud.instances(tags=tags.of_cluster(settings.name)))
            keeper.refuse_another(machines, cloud.now())
            state = keeping.first_state(cloud, settings, workload, run)
            unit = service.service_of(settings.name, state.run_id, state.nodes, replacements, list_price=list_price)
            if install:
                service.try_environment(unit, ["status" if state.addresses else "cost"])
            question = keeping.question(settings, machines, state, replacements, list_price=list_price)
            flags = {"run": run, "replacements": replacements, "list_price": list_price, "install": install}
            ask(yes, question, yes_command("keep", keep, **flags))
            if not install:
                send = notifier.send
                _keep(keeping.Keeper(cloud, settings, workload, state, replacements, say, send, list_price=list_price))
        if install:
            service.install(unit, say)


@task(
    name="service",
    auto_shortflags=False,
    help={
        "run": "run to keep",
        "nodes": "number of machines that the run may have",
        "replacements": "number of machines that may be ordered, however often the service begins",
        "list_price": "order at the list price if there is no spot machine",
    },
)
def keep_as_service(c: Context, run: str = "", nodes: int = 1, replacements: int = 0, list_price: bool = False) -> None:
    """What the service of fab keep --install runs."""
    with sentences("no longer kept: the run continues as long as its machines"):
        settings = cluster_toml.load_settings()
        cloud = opening.open_cloud(settings)
        with keeper.alone(settings.name), closing(notify.notifier_or_none(settings, say)) as notifier:
            left = service.orders_left(settings.name, run, replacements)
            state = RunState(run, "not looked at yet", is_active=True, nodes=nodes)
            its = (cloud, settings, c.spotune.workload, state, left, say, notifier.send)
            noted = partial(service.note_orders, settings.name, run)
            _keep(keeping.Keeper(*its, is_service=True, list_price=list_price, note_orders=noted))


def _keep(loop: keeping.Keeper) -> None:
    """Until it ends; a signal ends it as Ctrl-C does. Raises Exit where the run has not finished."""
    with signals_as_ctrl_c(), keeper.named(loop.settings, say):
        reason = loop.keep()
    if not loop.run.is_finished:
        raise Exit(reason, STOPPED if loop.run.is_stopped else FAILURE)
    say(reason)


def _price(cloud: Cloud, settings: Settings) -> cost.SnapshotPrice:
    return cost.SnapshotPrice(settings.rental.snapshot_price_gib_month, ledger.Ledger.of(cloud, settings).currency)


def _doctor(c: Context) -> None:
    try:
        c.spotune.doctor(c)
    except Exit:
        raise Exit("the doctor found something broken; fix it as described, then: fab doctor", FAILURE) from None


snapshots = Collection("snapshots", create, list_snapshots, prune)
keeping_tasks = Collection("keep")
keeping_tasks.add_task(keep, name="run", default=True)
keeping_tasks.add_task(keep_as_service)
namespace = Collection(snapshots, keeping_tasks, rebuild)
