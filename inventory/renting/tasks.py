"""fab up / down / cost: renting machines of a cloud, or of this machine's own imitation of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from invoke import Collection, task

from inventory.command_line import ask, say, sentences
from inventory.saying_yes import yes_command

if TYPE_CHECKING:
    from inventory.cloud.values import Instance
    from inventory.settings import Settings

RECORD = "folder for the cloud's answers, without what they tell about you"


def _cloud(settings: Any, record: str) -> Any:
    """The cluster's region. Raises RentError, SettingsError where the machines are not rented."""
    from pathlib import Path

    from inventory.cloud.errors import RentError
    from inventory.cloud.opening import open_cloud

    folder = Path(record).expanduser() if record else None
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RentError(f"--record {record}: no folder can be made there: {error.strerror}") from None
    return open_cloud(settings, folder)


@task(
    auto_shortflags=False,
    help={
        "nodes": "how many machines there are to be; 0: as cluster.toml says",
        "hours": "until the cloud releases them by itself, also those that stand; 0: as cluster.toml says for new ones",
        "yes": "rent them without asking",
        "partial": "rather some machines than none, of several types and zones if need be",
        "others": "although machines or disks of the cluster are another owner's, by their tag",
        "dry": "only show what it would do and cost",
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
    dry: bool = False,
    record: str = "",
) -> None:
    """Rent what is missing of the cluster, after showing what it costs."""
    with sentences("interrupted; what was made is tagged: `fab up` goes on with it, `fab down` removes it"):
        from inventory.renting import keys, members, show
        from inventory.renting.machines import apply_plan
        from inventory.renting.plan import Wish, plan_up
        from inventory.settings import load_settings

        settings = load_settings()
        length = hours or settings.rental.hours
        wish = Wish(nodes or settings.rental.nodes, length, None, partial, bool(hours), others=others)
        cloud = _cloud(settings, record)
        plan = plan_up(cloud, settings, wish)
        show.show(show.up_table(plan))
        if settings.on_this_machine:
            show.show("this machine's own cloud takes no money: prices are made up, and nothing is billed")
        if plan.numbers and (said := keys.note(settings)):
            show.show(said)
        if dry:
            return
        again = yes_command("up", up, nodes=nodes, hours=hours, partial=partial, others=others, record=record)
        if plan.numbers or plan.stopped:
            ask(yes, f"rent {members.so_many(len(plan.numbers))}?", again)
        elif plan.longer:
            ask(yes, f"keep {members.so_many(len(plan.longer))} longer?", again)
        machines = apply_plan(cloud, settings, plan, say)
        _tell_head(settings, machines)
        show.show(show.machines_table(machines, settings, cloud.now()))
    say(f"next: {settings.deploy_command}")


@task(
    auto_shortflags=False,
    help={
        "disks": "the kept data disks too, and what is on them",
        "yes": "delete without asking",
        "others": "although machines, disks or snapshots of the cluster are another owner's, by their tag",
        "anyway": "although a snapshot of a disk is still being stored, which then fails",
        "record": RECORD,
    },
)
def down(
    c: Any, disks: bool = False, yes: bool = False, anyway: bool = False, others: bool = False, record: str = ""
) -> None:
    """Delete the rented machines; says what stays and what that costs."""
    with sentences("interrupted; `fab down` goes on, `fab cost` shows what is left"):
        from inventory.renting import show
        from inventory.renting.down import apply_down, plan_down
        from inventory.settings import load_settings

        settings = load_settings()
        cloud = _cloud(settings, record)
        plan = plan_down(cloud, settings, disks, anyway, others)
        if plan.machines and (active := _active_run()):
            show.show(f"{active} is going on there: it ends with the machines; `fab stop` lets it save first")
        show.show(*show.down_lines(plan, settings))
        if not plan.is_empty:
            again = yes_command("down", down, disks=disks, anyway=anyway, others=others, record=record)
            ask(yes, "delete them?", again)
            apply_down(cloud, settings, plan, say)
    left = "nothing that is billed is left but what stays" if plan.kept or plan.snapshots else "nothing is left"
    say(f"{left} in {cloud.region_id}; elsewhere there is what is named above" if plan.elsewhere else left)


def _tell_head(settings: Settings, machines: Sequence[Instance]) -> None:
    """A run that is going on, or will be, saves and leaves before the machines are released."""
    from contextlib import closing

    from inventory.renting import members
    from training.laptop.head_node import HeadError, RemoteHead
    from training.laptop.rental import tell_release

    ends = [each.release_at for each in machines if each.release_at]
    if not ends:
        return
    try:
        with closing(RemoteHead(members.as_nodes(settings, machines, ())[0])) as head:
            tell_release(head, min(ends))
    except HeadError as error:
        say(f"the head could not be told until when it has time ({error}): the next start of a run does, or fab up")


def _active_run() -> str:
    """The run that is going on, as far as the head tells within seconds."""
    from contextlib import closing

    from inventory import ssh
    from inventory.cluster import load_cluster
    from training.laptop import runs
    from training.laptop.head_node import HeadError, RemoteHead

    try:
        with closing(RemoteHead(load_cluster().head)) as head:
            return runs.going_on(head)
    except (ssh.SshError, HeadError, ValueError, RuntimeError, OSError):
        return ""


@task(auto_shortflags=False, help={"record": RECORD})
def cost(c: Any, record: str = "") -> None:
    """What the cluster has cost, will cost, and what is left of the budget."""
    with sentences():
        from inventory.renting import report
        from inventory.settings import load_settings

        settings = load_settings()
        report.report_cost(_cloud(settings, record), settings)


namespace = Collection(up, down, cost)
