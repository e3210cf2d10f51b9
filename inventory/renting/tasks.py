"""fab up / down / cost: renting machines of a cloud, or of this machine's own imitation of one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invoke import Collection, task

from inventory.command_line import ask, say, sentences, yes_command
from inventory.shown import clock
from training.laptop.tasks import stop
from training.text.deferred import deferred

with deferred():
    from inventory import cluster as clusters
    from inventory import setting_types
    from inventory import settings as cluster_toml
    from inventory.cloud import errors
    from inventory.renting import access, members, report
    from inventory.renting import disks as disk_plans
    from inventory.renting import down as removal
    from inventory.renting import machines as rented_machines
    from inventory.renting import plan as planning
    from training.laptop import at_risk, derived, head_node, rental
    from training.run import folder as run_folder

if TYPE_CHECKING:
    from inventory.cloud.values import Instance
    from inventory.renting.down import DownPlan
    from inventory.settings import Settings
    from training.laptop.at_risk import RunsAtRisk

WAIT = "if a machine is being reclaimed, wait until the disk that its successor gets is free"
RECORD = "save the cloud's answers to this folder, with your personal details removed"


def _cloud(settings: Any, record: str) -> Any:
    """As `report.open_account`; the cloud's answers go into the folder `record`, which is made. Raises RentError."""
    try:
        folder = setting_types.expanded(Path(record)) if record else None
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        raise errors.RentError(f"--record {record}: {error}") from None
    except OSError as error:
        raise errors.RentError(f"--record {record}: no folder can be made there: {error.strerror}") from None
    return report.open_account(settings, folder)


@task(
    auto_shortflags=False,
    help={
        "nodes": "total number of machines; 0: as in cluster.toml",
        "hours": "hours until the cloud releases all machines; 0: as in cluster.toml, for new machines only",
        "yes": "do not ask for confirmation",
        "partial": "accept fewer machines, of several types and zones if needed",
        "others": "proceed even if machines or disks are tagged with another owner",
        "wait": WAIT,
        "dry": "only show what would be done and its cost",
        "record": RECORD,
    },
)
def up(
    c: Any,
    nodes: int = 0,
    hours: float = 0.0,
    yes: bool = False,
    partial: bool = False,
    others: bool = False,
    wait: bool = False,
    dry: bool = False,
    record: str = "",
) -> None:
    """Rent the missing machines of the cluster, after showing the cost."""
    with sentences("interrupted; what was made is tagged: `fab up` goes on with it, `fab down` removes it"):
        settings = cluster_toml.load_settings()
        members.refuse_nameless(settings)
        notes = derived.refuse_unknown(settings.models.names)
        length = hours or settings.rental.hours
        wish = planning.RentalWish(nodes or settings.rental.nodes, length, None, partial, bool(hours), others=others)
        cloud = _cloud(settings, record)
        plan = disk_plans.when_free(lambda: planning.plan_up(cloud, settings, wish), wait, cloud)
        derived.refuse_incomplete(settings.models.names, sent_before=1 not in plan.numbers or 1 in plan.kept)
        notes += derived.notes_on(settings.models.names)
        report.display(report.up_table(plan), *notes)
        if settings.on_this_machine:
            report.display("this machine's own cloud takes no money: prices are made up, and nothing is billed")
        if plan.numbers and (note := access.note(settings)):
            report.display(note)
        if plan.numbers and plan.there and (note := _stake()[0].stays_on):
            report.display(note)
        if dry:
            return
        again = yes_command("up", up, nodes=nodes, hours=hours, partial=partial, others=others, record=record)
        if plan.stopped and not plan.numbers:
            ask(yes, f"start {', '.join(map(members.label, plan.stopped))}?", again)
        elif plan.numbers:
            ask(yes, f"rent {members.so_many(len(plan.numbers))}?", again)
        elif plan.extended:
            ask(yes, f"keep {members.so_many(len(plan.extended))} longer?", again)
        machines = rented_machines.apply_plan(cloud, settings, plan, say)
        _tell_head(settings, machines)
        report.display(report.machines_table(machines, settings, cloud.now()))
    say(f"next: {settings.deploy_command}")


@task(
    auto_shortflags=False,
    iterable=["node"],
    help={
        "node": "delete only this machine, such as te4; repeatable, and can be given without the flag: fab down te4",
        "disks": "also delete the data disks and everything on them",
        "yes": "do not ask for confirmation",
        "others": "proceed even if machines, disks or snapshots are tagged with another owner",
        "anyway": "proceed even if a snapshot is still being stored; that snapshot then fails",
        "stop_run": "stop an active run first, as fab stop does",
        "force": "proceed even if a run is active, checkpoints are lost that are nowhere else, or te1 does not answer",
        "record": RECORD,
    },
)
def down(
    c: Any,
    node: Sequence[str],
    disks: bool = False,
    yes: bool = False,
    anyway: bool = False,
    others: bool = False,
    stop_run: bool = False,
    force: bool = False,
    record: str = "",
) -> None:
    """Delete the rented machines, or one of them; show what remains and its cost."""
    with sentences("interrupted; `fab down` goes on, `fab cost` shows what is left"):
        settings = cluster_toml.load_settings()
        cloud = _cloud(settings, record)
        plan = removal.plan_down(cloud, settings, disks, anyway, others, nodes=node)
        protected = {"named": bool(node), "force": force}
        lines, stopping = _at_stake(plan, agreed=yes, stop_run=stop_run, **protected)
        report.display(*lines, *report.down_lines(plan, settings))
        if not plan.is_empty:
            flags = {"disks": disks, "anyway": anyway, "others": others, "stop_run": stop_run, "force": force}
            ask(yes, "delete them?", yes_command(" ".join(["down", *node]), down, record=record, **flags))
            if stopping:
                stop(c, run=stopping)
                _at_stake(plan, agreed=True, **protected)  # nobody has read yet what it saved just now
            removal.apply_down(cloud, settings, plan, say)
    if plan.remaining:
        say(report.remaining_line(plan.remaining))
        return
    left = "nothing that is billed is left but what stays" if plan.kept or plan.snapshots else "nothing is left"
    more = "; elsewhere there is what is named above" if plan.elsewhere else ""
    say(f"{left} in {cloud.region_id}{more}")


def _at_stake(
    plan: DownPlan, *, named: bool, agreed: bool, force: bool, stop_run: bool = False
) -> tuple[list[str], str]:
    """What goes with the machines beside themselves, as far as the head tells within seconds; the run to stop first.

    Raises RentError where runs or their only copies would go, or the head tells nothing of them, but for `force`: for
    machines that were named, and where the user agreed before reading what goes.
    """
    everything = members.members((*plan.machines, *plan.remaining))
    by_name = dict(zip(members.names(everything), everything, strict=True))
    going = {name for name, each in by_name.items() if each in plan.machines}
    head = by_name.get(members.HEAD)
    on_head, silence = _stake() if head else (None, "")
    stake = on_head or at_risk.RunsAtRisk()  # no run outlives its head
    stopping = stake.active if stop_run and stake.hosts & going else ""

    running = [] if stopping else [*stake.running_on(going)]
    on_disk, unknown = _on_heads_disk(plan, on_head, silence)
    silent = bool(head and silence and going and not head.is_stopped)
    not_answered = [f"whether a run is going on there is not known: {silence}"] if silent else []
    unfetched = [stake.left_on(members.HEAD)] if members.HEAD in going and stake.unfetched else []

    losses = [*running, *on_disk, *not_answered, *(unfetched if named else [])]
    if losses and (named or agreed) and not force:
        raise errors.RentError(f"{'; '.join(losses)}; nothing was deleted (--force: all the same)")
    return [*losses, *([] if named else unfetched), *unknown], stopping


def _on_heads_disk(plan: DownPlan, stake: RunsAtRisk | None, silence: str) -> tuple[list[str], list[str]]:
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
        runs = at_risk.left_behind(run_folder.LOCAL_RUNS, since) if stake is None else stake.unfinished
        losses, unknown = [*at_risk.lost_with(disk, runs, held, head_is_there=stake is not None)], []
    except Exception as error:  # the runs' files are a node's words: whatever fails at them stops no `fab down`
        losses, unknown = [], [f"what of its runs is only on {disk} is not known: {str(error) or type(error).__name__}"]
    return losses, unknown if stake else [*unknown, *_saved_since(plan, disk, held)]


def _saved_since(plan: DownPlan, disk: str, held: float) -> list[str]:
    """That a disk, whose head is gone, may have more than its newest snapshot of that time, in seconds since 1970."""
    if plan.head_gone is None or plan.head_gone.timestamp() <= held:
        return []
    newest = f"the newest snapshot is of {clock(datetime.fromtimestamp(held, UTC))}" if held else "no snapshot has any"
    until = f"{members.HEAD} was there until {clock(plan.head_gone)} at the latest, {newest}"
    return [f"{until}: what runs saved in between is only on {disk} and is lost with it; {at_risk.KEEP_DISK}"]


def _stake() -> tuple[RunsAtRisk, str]:
    """What the head says of its runs; why it says nothing."""
    try:
        with closing(head_node.RemoteHead(clusters.load_cluster().head)) as head:
            return at_risk.at_stake(head, run_folder.LOCAL_RUNS), ""
    except Exception as error:  # as above
        return at_risk.RunsAtRisk(), str(error) or type(error).__name__


def _tell_head(settings: Settings, machines: Sequence[Instance]) -> None:
    """A run that is going on, or will be, saves and leaves before the machines are released."""
    ends = [each.release_at for each in machines if each.release_at]
    if not ends:
        return
    try:
        with closing(head_node.RemoteHead(members.as_nodes(settings, machines, ())[0])) as head:
            rental.tell_release(head, min(ends))
    except head_node.HeadError as error:
        say(f"the head could not be told until when it has time ({error}): the next start of a run does, or fab up")


@task(auto_shortflags=False, help={"record": RECORD})
def cost(c: Any, record: str = "") -> None:
    """Show what the cluster has cost, will cost, and what is left of the budget."""
    with sentences():
        settings = cluster_toml.load_settings()
        report.report_cost(_cloud(settings, record), settings)


namespace = Collection(up, down, cost)
