"""fab up / down / cost: renting machines of a cloud, or of this machine's own imitation of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invoke import Collection, task

from inventory.command_line import ask, say, sentences, yes_command
from training.text.deferred import deferred

with deferred():
    from inventory import setting_types
    from inventory import settings as cluster_toml
    from inventory.cloud import errors
    from inventory.renting import access, keeper, members, report
    from inventory.renting import disks as disk_plans
    from inventory.renting import down as removal
    from inventory.renting import machines as rented_machines
    from inventory.renting import plan as planning

if TYPE_CHECKING:
    from inventory.cloud.values import Instance
    from inventory.renting.workload import NodeWorkload
    from inventory.settings import Settings

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
    workload: NodeWorkload = c.spotune.workload
    with sentences("interrupted; what was made is tagged: `fab up` goes on with it, `fab down` removes it"):
        settings = cluster_toml.load_settings()
        members.refuse_nameless(settings)
        notes = workload.refuse_unknown(settings.models.names)
        length = hours or settings.rental.hours
        wish = planning.RentalWish(nodes or settings.rental.nodes, length, None, partial, bool(hours), others=others)
        cloud = _cloud(settings, record)
        plan = disk_plans.when_free(lambda: planning.plan_up(cloud, settings, wish), wait, cloud)
        workload.refuse_incomplete(settings.models.names, sent_before=1 not in plan.numbers or 1 in plan.kept)
        notes += workload.notes_on(settings.models.names)
        report.display(report.up_table(plan), *notes)
        if settings.on_this_machine:
            report.display("this machine's own cloud takes no money: prices are made up, and nothing is billed")
        if plan.numbers and (note := access.note(settings)):
            report.display(note)
        if plan.numbers and plan.there and (note := workload.stays_on()):
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
        _tell_head(workload, settings, machines)
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
        "force": "proceed even if a run is active, checkpoints are lost that are nowhere else, te1 does not answer, or "
        "fab keep on another machine would replace what is deleted",
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
    workload: NodeWorkload = c.spotune.workload
    with sentences("interrupted; `fab down` goes on, `fab cost` shows what is left"):
        settings = cluster_toml.load_settings()
        cloud = _cloud(settings, record)
        plan = removal.plan_down(cloud, settings, disks, anyway, others, nodes=node)
        protected = {"named": bool(node), "force": force}
        lines, stopping = workload.lost_with(plan, agreed=yes, stop_run=stop_run, **protected)
        report.display(*lines, *report.down_lines(plan, settings))
        if not plan.is_empty:
            with keeper.alone(settings.name):
                if not force:
                    keeper.refuse_another((*plan.machines, *plan.remaining), cloud.now())
                flags = {"disks": disks, "anyway": anyway, "others": others, "stop_run": stop_run, "force": force}
                ask(yes, "delete them?", yes_command(" ".join(["down", *node]), down, record=record, **flags))
                if stopping:
                    workload.stop(stopping)
                    # nobody has read yet what it saved just now: where that would go, this refuses
                    workload.lost_with(plan, agreed=True, **protected)
                removal.apply_down(cloud, settings, plan, say)
    if plan.remaining:
        say(report.remaining_line(plan.remaining))
        return
    left = "nothing that is billed is left but what stays" if plan.kept or plan.snapshots else "nothing is left"
    more = "; elsewhere there is what is named above" if plan.elsewhere else ""
    say(f"{left} in {cloud.region_id}{more}")


def _tell_head(workload: NodeWorkload, settings: Settings, machines: Sequence[Instance]) -> None:
    """A run that is going on, or will be, saves and leaves before the machines are released."""
    ends = [each.release_at for each in machines if each.release_at]
    if not ends:
        return
    if silence := workload.tell_release(members.as_nodes(settings, machines, ())[0], min(ends)):
        say(f"the head could not be told until when it has time ({silence}): the next start of a run does, or fab up")


@task(auto_shortflags=False, help={"record": RECORD})
def cost(c: Any, record: str = "") -> None:
    """Show what the cluster has cost, will cost, and what is left of the budget."""
    with sentences():
        settings = cluster_toml.load_settings()
        report.report_cost(_cloud(settings, record), settings)


namespace = Collection(up, down, cost)
