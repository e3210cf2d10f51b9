"""fab runs / runs.delete / runs.metrics."""

from __future__ import annotations

from collections.abc import Mapping

from invoke import Collection, Context, Exit, task

from inventory.command_line import ask, say, sentences, yes_command
from training.laptop.tasks import HERE_RUNS_HELP


@task(
    auto_shortflags=False,
    name="list",
    default=True,
    help={"json": "print it for other programs", "here": "those on this machine, and no head is asked"},
)
def list_runs(c: Context, json: bool = False, here: bool = False) -> None:
    """All runs, here and on the head: how far, what came home, what they cost."""
    with sentences():
        import sys

        from inventory.shown import console, table
        from training.laptop.run_list import listing
        from training.run_folder import LOCAL_RUNS

        found, note = listing.listed(LOCAL_RUNS, here)
        if json:
            say(listing.as_json(found))
        elif found:
            console().print(table(listing.HEADER, listing.lines(found), listing.WORDS))
        else:
            say("there are no runs")
        if note:
            print(note, file=sys.stderr)


@task(
    auto_shortflags=False,
    iterable=["run"],
    help={
        "run": "run id; may be repeated, and said without the flag: fab runs.delete ID ...",
        "only": "laptop or head; without it both",
        "force": "even where a run that stays was trained from a model in them",
        "yes": "do not ask",
        "here": "this machine's copies alone, and no head is asked",
    },
)
def delete(
    c: Context, run: list[str], only: str = "", force: bool = False, yes: bool = False, here: bool = False
) -> None:
    """Delete runs here and on the nodes; says first what is lost for good."""
    with sentences("interrupted; what is left is there whole or in part: fab runs, and the same command again"):
        from training.laptop.open_cluster import opened
        from training.laptop.run_list import deleting, listing
        from training.run_folder import LOCAL_RUNS

        found, unasked = listing.listed(LOCAL_RUNS, here)
        going = deleting.planned(found, run, only)
        if not force:
            deleting.refuse_bases(going, found, LOCAL_RUNS)
        note = [unasked] if unasked and not going.all_made_here else []
        say("\n".join([*note, *deleting.lines(going, head_asked=not (unasked or here))]))
        ids = " ".join(row.run_id for row in going.rows)
        ask(yes, "delete them?", yes_command(f"runs.delete {ids}", delete, only=only, force=force, here=here))
        failed: Mapping[str, str] = {}
        if going.of("head"):
            with opened(False) as cluster:
                failed = deleting.on_nodes(going, cluster)
        deleting.on_laptop(going, LOCAL_RUNS)
    if failed:
        raise Exit("; ".join(f"{name}: {why}" for name, why in failed.items()), code=1)
    say(f"deleted {len(going.rows)}")


@task(
    auto_shortflags=False,
    help={"run": "run id; without it all runs, to compare them", "here": HERE_RUNS_HELP},
)
def metrics(c: Context, run: str = "", here: bool = False) -> None:
    """Open TensorBoard on the head, through ssh, until Ctrl-C."""
    from training.laptop import tensorboard
    from training.laptop.open_cluster import opened

    with sentences(), opened(here) as cluster:
        tensorboard.show(cluster.head, run or None)


runs = Collection("runs", list_runs, delete, metrics)
namespace = Collection(runs)
