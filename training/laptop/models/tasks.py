"""fab models / models.add / models.delete."""

from __future__ import annotations

from invoke import Collection, Context, Exit, task

from inventory.command_line import ask, say, sentences, yes_command
from inventory.shown import print_json
from training.text.deferred import deferred

with deferred():
    from inventory import settings as cluster_toml
    from training.laptop import open_cluster
    from training.laptop.models import adding, deleting, table
    from training.models import names
    from training.run import folder as run_folder


@task(
    auto_shortflags=False,
    name="list",
    default=True,
    help={"here": "models on this machine, for --here", "json": "print as JSON"},
)
def list_models(c: Context, here: bool = False, json: bool = False) -> None:
    """List all recipes: model size, nodes that have it, and how it fits."""
    with sentences():
        at, folders_by_node, notes = table.asked(here)
        rows = table.rows(at, folders_by_node)
        if json:
            print_json([vars(row) for row in rows])
            return
        if folders_by_node and (others := table.without_recipe(folders_by_node)):
            notes.append(f"on {'this machine' if here else 'the nodes'} without a recipe: {', '.join(others)}")
        table.show(table.lines(rows), notes, here)


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
        named = adding.new_name(meant, name)
        if meant.recipe not in names.shipped_models():
            say(f"looking up {model} and counting its layers")
        text = adding.new_text(meant, named)
        path = names.RECIPES / f"{named}.toml"
        run_folder.write_atomically(path, text)
        say(text.rstrip())
        say(f"written to {path}; edit it as you like")
        deploy = cluster_toml.load_settings().deploy_command
        say(f'next: add "{path.stem}" to [models] names in cluster.toml; {deploy}; then')
        say(f"      fab train --model {path.stem} --data FILE")


@task(
    auto_shortflags=False,
    help={
        "model": "recipe, OWNER/NAME, or a folder name in /data/models",
        "here": "the model on this machine, for --here",
        "force": "proceed even if runs were trained from it",
        "yes": "do not ask",
    },
)
def delete(c: Context, model: str, here: bool = False, force: bool = False, yes: bool = False) -> None:
    """Delete an unused base model from all nodes."""
    with sentences("interrupted; a model that is left in part is made whole by the base deploy, or deleted again"):
        with open_cluster.open_cluster(here) as cluster:
            going = deleting.planned(cluster, model, force)
            say("\n".join(going.lines))
            ask(yes, "delete it?", yes_command(f"models.delete {model}", delete, here=here, force=force))
            failed = deleting.delete(cluster, going)
    if failed:
        raise Exit("; ".join(f"{name}: {why}" for name, why in failed.items()), code=1)
    say(f"deleted {going.folder}")


models = Collection("models", list_models, add, delete)
namespace = Collection(models)
