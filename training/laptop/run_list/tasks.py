"""fab runs / runs.delete / runs.metrics."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from invoke import Collection, Context, Exit, task

from inventory.command_line import ask, say, sentences, yes_command
from inventory.shown import print_json
from training.laptop.tasks import HERE_RUNS_HELP
from training.text.deferred import deferred

with deferred():
    from inventory import terminal
    from training.laptop import open_cluster, tunnels
    from training.laptop.run_list import deleting, listing
    from training.run import folder as run_folder


@task(
    auto_shortflags=False,
    name="list",
    default=True,
    help={"json": "print as JSON", "here": "only runs on this machine; the head is not asked"},
)
def list_runs(c: Context, json: bool = False, here: bool = False) -> None:
    """List all runs, on the laptop and on the head: progress, copies, cost."""
    with sentences():
        rows, note = listing.listed(run_folder.LOCAL_RUNS, here)
        if json:
            print_json([listing.values(row) for row in rows])
        elif rows:
            terminal.console().print(terminal.table(listing.HEADER, listing.lines(rows), listing.WORDS))
        else:
            say("there are no runs")
        if note:
            print(note, file=sys.stderr)


@task(
    auto_shortflags=False,
    iterable=["run"],
    help={
        "run": "run id; repeatable, and can be given without the flag: fab runs.delete ID ...",
        "only": "laptop or head; default: both",
        "force": "proceed even if a remaining run was trained from a model in them",
        "yes": "do not ask",
        "here": "only this machine's copies; the head is not asked",
    },
)
def delete(
    c: Context, run: list[str], only: str = "", force: bool = False, yes: bool = False, here: bool = False
) -> None:
    """Delete runs on the laptop and on the nodes; shows what would be lost."""
    with sentences("interrupted; what is left is there whole or in part: fab runs, and the same command again"):
        rows, unasked = listing.listed(run_folder.LOCAL_RUNS, here)
        going = deleting.planned(rows, run, only)
        if not force:
            deleting.refuse_bases(going, rows, run_folder.LOCAL_RUNS)
        note = [unasked] if unasked and not going.all_made_here else []
        say("\n".join([*note, *deleting.lines(going, head_asked=not (unasked or here))]))
        ids = " ".join(row.run_id for row in going.rows)
        ask(yes, "delete them?", yes_command(f"runs.delete {ids}", delete, only=only, force=force, here=here))
        failed: Mapping[str, str] = {}
        if going.of("head"):
            with open_cluster.open_cluster(False) as cluster:
                failed = deleting.on_nodes(going, cluster)
        deleting.on_laptop(going, run_folder.LOCAL_RUNS)
    if failed:
        raise Exit("; ".join(f"{name}: {why}" for name, why in failed.items()), code=1)
    say(f"deleted {len(going.rows)}")


@task(
    auto_shortflags=False,
    help={"run": "run id; default: all runs, for comparison", "here": HERE_RUNS_HELP},
)
def metrics(c: Context, run: str = "", here: bool = False) -> None:
    """Open TensorBoard on the head, through ssh, until Ctrl-C."""
    with sentences(), open_cluster.open_cluster(here) as cluster:
        tunnels.show(cluster.head, run or None)


runs = Collection("runs", list_runs, delete, metrics)
namespace = Collection(runs)
