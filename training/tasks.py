"""fab check / train / logs / status / stop / fetch / metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from invoke import Collection, Context, Exit, task

from inventory.command_line import sentences

if TYPE_CHECKING:
    from inventory.nodes import Node
    from training.control.debugger import Tunnel
    from training.control.head_node import Head
    from training.control.place import Place

HERE_HELP = "on this machine, a rank a GPU or two on its CPU; nothing is provisioned"
HERE_RUNS_HELP = "the runs of this machine, made with --here"
NODE_ANSWER_S = 45.0
RUN_HELP = "run id; without it the newest run"


@contextmanager
def _place(here: bool) -> Iterator[tuple[Place, tuple[Node, ...]]]:
    """The head with its nodes, or this machine, which has none; the connection is closed in the end."""
    place, nodes = _find_place(here)
    try:
        yield place, nodes
    finally:
        place.head.close()


def _find_place(here: bool) -> tuple[Place, tuple[Node, ...]]:
    from functools import partial
    from pathlib import Path

    from training.control.head_node import HereHead, RemoteHead
    from training.control.place import Place
    from training.control.preparing import PREPARE_S
    from training.launch import Host
    from training.run_folder import LOCAL_RUNS

    if here:
        return Place(HereHead(Path(LOCAL_RUNS))), ()
    from inventory import ssh
    from inventory.cluster import load_cluster
    from inventory.nodes import price_of

    cluster = load_cluster()
    head = cluster.head
    hosts = tuple(Host(node.name, node.private_address, node.slots) for node in cluster.nodes)
    cuda = cluster.settings.torch_flavour == "cuda" and any(node.gpus for node in cluster.nodes)
    rate = cluster.settings.network.line_rate_gbps or None
    price_h, currency = price_of(cluster.nodes)
    # the head gives up a command by its own clock; this one is for what takes longest, preparing data
    remote = RemoteHead(head.name, lambda: ssh.connect(head), partial(ssh.run, timeout_s=PREPARE_S))
    place = Place(
        remote,
        hosts,
        cuda,
        cluster.settings.name,
        rate,
        price_h=price_h,
        currency=currency,
        disk=head.disk_serial or "",
    )
    return place, cluster.nodes


def _on(node: Node, command: str) -> str:
    """What a command prints on a node; an answer is waited for as long as a sweep may take."""
    from inventory import ssh

    return ssh.ask(node, command, timeout_s=NODE_ANSWER_S).strip()


def _on_all(nodes: Sequence[Node], command: str) -> dict[str, str | Exception]:
    from inventory import ssh

    return ssh.on_all(nodes, lambda node: _on(node, command))


def _cover(head: Head, seconds: float) -> None:
    """Let rented machines live for as long as a run takes."""
    from functools import partial

    from inventory.renting import lease
    from inventory.settings import load_settings
    from training.control import release

    lease.cover(load_settings(), seconds, print, partial(release.tell, head))


@contextmanager
def _lease(head: Head) -> Iterator[None]:
    """Inside, the cloud does not release rented machines at their planned end."""
    from training.control.head_node import RemoteHead

    if not isinstance(head, RemoteHead):
        yield
        return
    from functools import partial

    from inventory.renting import lease
    from inventory.settings import load_settings
    from training.control import release

    own = head.another()
    with closing(own), lease.kept(load_settings(), print, partial(release.tell, own)):
        yield


@task(
    auto_shortflags=False,
    iterable=["set"],
    optional=["resume"],
    help={
        "model": "recipe name; an unknown one lists them all",
        "data": "JSONL, JSON or Parquet, a folder of them, or OWNER/NAME of a data set on the Hub",
        "steps": "optimizer steps instead of the recipe's",
        "set": "key=value for any recipe key; may be repeated",
        "resume": "go on with the newest run of the model, or with the run id given",
        "force": "resume though recipe, base model or data are not what they were",
        "here": HERE_HELP,
        "detach": "start it and come back at once",
        "no_fetch": "leave the results on the head",
        "dry": "only check and plan: will it run, will it teach?",
        "anyway": "start although an estimate (memory, number of records) says no",
        "skip_bad": "leave out records that cannot be used, and count them",
        "debug_rank": "this rank waits for a debugger, to which a tunnel leads; the others wait for it",
        "profile": "steps to profile on all ranks: 3 (after two of warm-up) or 10-12",
    },
)
def train(
    c: Context,
    model: str = "",
    data: str = "",
    steps: str = "",  # as text, so that 0 is refused and not taken for nothing
    set: Sequence[str] | None = None,  # invoke wants None here to make a list of it
    resume: str | None = None,
    force: bool = False,
    here: bool = False,
    detach: bool = False,
    no_fetch: bool = False,
    dry: bool = False,
    anyway: bool = False,
    skip_bad: bool = False,
    debug_rank: str = "",  # as text, so that rank 0 is not taken for nothing
    profile: str = "",
) -> None:
    """Fine-tune a model: check, ship, start, follow, fetch."""
    from dataclasses import replace
    from datetime import UTC, datetime
    from functools import cache

    with sentences(), ExitStack() as stack:
        from training.control import attend, debugger, resume_run, start_run
        from training.launch import LaunchError

        if force and resume is None:
            raise LaunchError("--force is for --resume: a new run has nothing to differ from")
        inspected = debugger.options(debug_rank, profile, detach)
        found = cache(lambda: stack.enter_context(_place(here)))
        place = cache(lambda: replace(found()[0], **inspected))
        cover = start_run.cover_nothing if here else _cover
        if resume is None:
            recipe = start_run.chosen_recipe(model, set or (), steps)
            wishes = start_run.Wishes(dry, anyway, skip_bad, cover)
            run_id = start_run.start(place, recipe, data, datetime.now(UTC), wishes)
        elif data or dry or anyway or skip_bad:
            raise LaunchError(
                "a resumed run keeps its data; leave --data, --dry, --anyway and --skip-bad out, "
                "or start a new run without --resume"
            )
        else:
            overrides = start_run.overrides_of(set or (), steps)
            asked = resume if isinstance(resume, str) else None
            run_id = resume_run.resume(place(), asked, model or None, overrides, force=force, cover=cover)
        if not run_id:
            return  # nothing was started: nothing is extended either
        if detach:
            attend.say_detached(run_id, here)
            return
        stack.enter_context(_lease(place().head))
        if debug_rank:
            stack.enter_context(debugger.reached(place().head, run_id, _tunnel(found()[1])))
        if seen := attend.attend(place().head, run_id):
            attend.conclude(place().head, run_id, seen)
            if not no_fetch:
                attend.bring_home(place().head, run_id)


@task(
    auto_shortflags=False,
    help={
        "run": RUN_HELP,
        "follow": "go on until the run is over",
        "rank": "a rank's own log",
        "facts": "what NCCL said of versions, interfaces, transports and trouble (with NCCL_DEBUG=INFO)",
        "here": HERE_RUNS_HELP,
    },
)
def logs(
    c: Context, run: str = "", follow: bool = False, rank: int = -1, facts: bool = False, here: bool = False
) -> None:
    """Show a run's log or one rank's; --follow shows its progress."""
    import shlex

    with sentences(), _place(here) as (place, nodes):
        from training.control import attend, runs

        head = place.head
        run_id = runs.find(head, run or None)
        if rank >= 0:
            launch = runs.read_launch(head, run_id)
            command = runs.rank_log_command(launch, rank)
            print(_on_node(head, nodes, launch.host_of(rank).name, command))
        elif facts:
            print("\n".join(attend.nccl_lines(head, run_id)))
        elif not follow:
            print(head.shell(f"tail -n 100 {shlex.quote(str(head.runs / run_id))}/logs/launcher.log"))
            print(attend.ending(run_id, runs.look(head, run_id)))
        else:
            with _lease(head):
                seen = attend.attend(head, run_id)
            if seen:
                attend.conclude(head, run_id, seen)


def _on_node(head: Head, nodes: Sequence[Node], name: str, command: str) -> str:
    """What a command prints on the node of that name."""
    if head.here:
        return head.shell(command)
    from training.launch import LaunchError

    for node in nodes:
        if node.name == name:
            return _on(node, command)
    raise LaunchError(f"it ran on {name}, which is not in the cluster any more")


def _tunnel(nodes: Sequence[Node]) -> Tunnel:
    """Tunnels to the nodes by name; on this machine, which has none, every port is here already."""
    from contextlib import nullcontext

    from inventory import ssh

    by_name = {node.name: node for node in nodes}
    return lambda name, port: ssh.tunnel(by_name[name], port) if nodes else nullcontext(port)


@task(auto_shortflags=False, help={"here": HERE_RUNS_HELP})
def status(c: Context, here: bool = False) -> None:
    """All runs with their state; whether every node answers; until when rented machines are there."""
    with sentences():
        if not here:
            _show_rented()
    with sentences(), _place(here) as (place, nodes):
        from inventory.shown import console, table
        from training.control import runs
        from training.control.terminal import runs_table

        if nodes:
            answers = _on_all(nodes, "uptime -p")
            rows = [[n.name, n.address, str(answers[n.name])] for n in nodes]
            console().print(table(["node", "address", "state"], rows))
            if record := runs.disk_record(place.head):
                print(f"/data on {place.head.name}: of the cluster {record.cluster}, generation {record.generation}")
        runs_table(runs.all_runs(place.head))


def _show_rented() -> None:
    """Rented machines before anything is asked of them: one that is being taken back may not answer."""
    from inventory.settings import load_settings

    settings = load_settings()
    if settings.is_rented:
        from inventory.renting.report import show_machines

        show_machines(settings)


@task(auto_shortflags=False, help={"run": RUN_HELP, "here": HERE_RUNS_HELP})
def stop(c: Context, run: str = "", here: bool = False) -> None:
    """End a run: it saves, leaves, and no rank is left anywhere."""
    with sentences(), _place(here) as (place, nodes):
        from training.control import attend, runs
        from training.control.ship import SOURCE
        from training.launch import sweep_command

        head = place.head
        run_id = runs.find(head, run or None)
        seen = runs.look(head, run_id)
        if not seen.over:
            runs.ask_to_stop(head, run_id)
            seen = attend.attend(head, run_id) or seen
        # a run whose supervisor is gone has nobody else to end its ranks
        code = str(SOURCE.parent) if head.here else ""
        command = sweep_command(runs.read_launch(head, run_id), only_list=seen.state != "lost", code=code)
        left = runs.left_on(_on_all(nodes, command) if nodes else {head.name: head.shell(command)})
        if left:
            raise Exit(f"{run_id}: {'; '.join(left)}", code=1)
        print(f"{run_id} {seen.state}; no process of it is left on any node")


@task(
    auto_shortflags=False,
    help={
        "run": RUN_HELP,
        "watch": "fetch every new checkpoint until the run is over",
        "full": "the optimizer's state too: as large as several adapters, and only a resume needs it",
        "here": HERE_RUNS_HELP,
    },
)
def fetch(c: Context, run: str = "", watch: bool = False, full: bool = False, here: bool = False) -> None:
    """Bring a run's newest adapter, metrics and logs home, verified."""
    with sentences(), _place(here) as (place, _):
        from training.control import attend, runs

        run_id = runs.find(place.head, run or None)
        step = attend.bring_home(place.head, run_id, full)
        if watch:
            attend.watch_home(place.head, run_id, step, full)


@task(
    auto_shortflags=False,
    help={
        "line_rate_gbps": "what the network promises, in Gbit/s, instead of the settings' own",
        "here": HERE_HELP,
        "json": "print result.json",
    },
)
def check(c: Context, line_rate_gbps: float = 0.0, here: bool = False, json: bool = False) -> None:
    """Check that the nodes talk correctly, and how fast."""
    if line_rate_gbps < 0:
        raise Exit(f"--line-rate-gbps {line_rate_gbps:g}: a rate is above 0", code=2)
    import sys
    from datetime import UTC, datetime

    with sentences(), _place(here) as (place, _):
        from training.control import attend, comm_report, runs
        from training.control.terminal import check_report, print_json
        from training.run_folder import LOCAL_RUNS

        run_id = runs.start_check(place, datetime.now(UTC))
        seen = attend.attend(place.head, run_id)
        if seen is None:
            return
        attend.conclude(place.head, run_id, seen)
        attend.bring_home(place.head, run_id)
        results, unreadable = runs.check_results(LOCAL_RUNS)
        for phrase in unreadable:
            print(phrase, file=sys.stderr)
        if run_id not in {result["run_id"] for result in results}:
            raise Exit(f"{run_id} left no result that can be read", code=1)
        result, previous = comm_report.this_and_previous(results, run_id)
        if json:
            print_json(result)
        else:
            check_report(result, previous, line_rate_gbps or place.line_rate_gbps)
        if comm_report.wrong_results(result):
            raise Exit("the collectives compute wrong results; do not train on these nodes", code=1)


@task(
    auto_shortflags=False,
    help={"run": "run id; without it all runs, to compare them", "here": HERE_RUNS_HELP},
)
def metrics(c: Context, run: str = "", here: bool = False) -> None:
    """Open TensorBoard on the head, through ssh, until Ctrl-C."""
    with sentences(), _place(here) as (place, _):
        from training.control import tensorboard

        tensorboard.show(place.head, run or None)


namespace = Collection(check, train, logs, status, stop, fetch, metrics)
