"""fab runs / runs.delete / runs.metrics, fab models / models.add / models.delete: what there is, and deleting it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from invoke import Collection, Context, Exit, task

from inventory.command_line import ask, say, sentences, yes_command
from inventory.shown import print_json
from training.laptop.tasks import HERE_RUNS_HELP
from training.text.deferred import deferred

with deferred():
    from inventory import settings as cluster_toml
    from inventory import terminal
    from training.laptop import at_risk, derived, models_on_nodes, open_cluster, status, tunnels
    from training.models import names
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
        rows, note = status.listed(run_folder.LOCAL_RUNS, here)
        if json:
            print_json([status.row_values(row) for row in rows])
        elif rows:
            terminal.console().print(terminal.table(status.HEADER, status.row_lines(rows), status.WRAPPING))
        else:
            say("there are no runs")
        if note:
            print(note, file=sys.stderr)


@task(
    auto_shortflags=False,
    name="delete",
    iterable=["run"],
    help={
        "run": "run id; repeatable, and can be given without the flag: fab runs.delete ID ...",
        "only": "laptop or head; default: both",
        "force": "proceed even if a remaining run was trained from a model in them",
        "yes": "do not ask",
        "here": "only this machine's copies; the head is not asked",
    },
)
def delete_runs(
    c: Context, run: list[str], only: str = "", force: bool = False, yes: bool = False, here: bool = False
) -> None:
    """Delete runs on the laptop and on the nodes; shows what would be lost."""
    with sentences("interrupted; what is left is there whole or in part: fab runs, and the same command again"):
        rows, unasked = status.listed(run_folder.LOCAL_RUNS, here)
        going = at_risk.plan_deletion(rows, run, only)
        if not force:
            at_risk.refuse_bases(going, rows, run_folder.LOCAL_RUNS)
        note = [unasked] if unasked and not going.all_made_here else []
        say("\n".join([*note, *at_risk.deletion_lines(going, head_asked=not (unasked or here))]))
        ids = " ".join(row.run_id for row in going.rows)
        ask(yes, "delete them?", yes_command(f"runs.delete {ids}", delete_runs, only=only, force=force, here=here))
        failed: Mapping[str, str] = {}
        if going.of("head"):
            with open_cluster.open_cluster(False) as cluster:
                failed = at_risk.delete_on_nodes(going, cluster)
        at_risk.delete_on_laptop(going, run_folder.LOCAL_RUNS)
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


@task(
    auto_shortflags=False,
    name="list",
    default=True,
    help={"here": "models on this machine, for --here", "json": "print as JSON"},
)
def list_models(c: Context, here: bool = False, json: bool = False) -> None:
    """List all recipes: model size, nodes that have it, and how it fits."""
    with sentences():
        at, folders_by_node, notes = models_on_nodes.asked(here)
        rows = models_on_nodes.rows(at, folders_by_node)
        if json:
            print_json([vars(row) for row in rows])
            return
        if folders_by_node and (others := models_on_nodes.without_recipe(folders_by_node)):
            notes.append(f"on {'this machine' if here else 'the nodes'} without a recipe: {', '.join(others)}")
        models_on_nodes.show(models_on_nodes.lines(rows), notes, here)


@task(
    auto_shortflags=False,
    help={
        "model": "OWNER/NAME on the Hub, or the name of a shipped recipe",
        "name": "name of the recipe; default: the model's name",
    },
)
def add(c: Context, model: str, name: str = "") -> None:
    """Write a model's recipe to a file for editing."""
    with sentences():
        meant = names.resolve(model)
        named = derived.new_name(meant, name)
        if meant.recipe not in names.shipped_models():
            say(f"looking up {model} and counting its layers")
        text = derived.new_text(meant, named)
        path = names.RECIPES / f"{named}.toml"
        run_folder.write_atomically(path, text)
        say(text.rstrip())
        say(f"written to {path}; edit it as you like")
        deploy = cluster_toml.load_settings().deploy_command
        say(f'next: add "{path.stem}" to [models] names in cluster.toml; {deploy}; then')
        say(f"      fab train --model {path.stem} --data FILE")


@task(
    auto_shortflags=False,
    name="delete",
    help={
        "model": "recipe, OWNER/NAME, or a folder name in /data/models",
        "here": "the model on this machine, for --here",
        "force": "proceed even if runs were trained from it",
        "yes": "do not ask",
    },
)
def delete_model(c: Context, model: str, here: bool = False, force: bool = False, yes: bool = False) -> None:
    """Delete an unused base model from all nodes."""
    with sentences("interrupted; a model that is left in part is made whole by the base deploy, or deleted again"):
        with open_cluster.open_cluster(here) as cluster:
            going = models_on_nodes.plan_deletion(cluster, model, force)
            say("\n".join(going.lines))
            ask(yes, "delete it?", yes_command(f"models.delete {model}", delete_model, here=here, force=force))
            failed = models_on_nodes.delete(cluster, going)
    if failed:
        raise Exit("; ".join(f"{name}: {why}" for name, why in failed.items()), code=1)
    say(f"deleted {going.folder}")


runs = Collection("runs", list_runs, delete_runs, metrics)
models = Collection("models", list_models, add, delete_model)
namespace = Collection(runs, models)
