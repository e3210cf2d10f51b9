"""fab models / models.add / models.delete."""

from __future__ import annotations

from invoke import Collection, Context, Exit, task

from inventory.command_line import ask, say, sentences, yes_command


@task(
    auto_shortflags=False,
    name="list",
    default=True,
    help={"here": "models of this machine, for --here", "json": "print it for other programs"},
)
def list_models(c: Context, here: bool = False, json: bool = False) -> None:
    """Every recipe with its model: how large, on which nodes, how it fits."""
    with sentences():
        from training.laptop.models import around, table

        at, there, notes = around.asked(here)
        found = table.rows(at, there)
        if json:
            say(table.as_json(found))
            return
        if there and (others := table.without_recipe(there)):
            notes.append(f"on {'this machine' if here else 'the nodes'} without a recipe: {', '.join(others)}")
        around.show(table.lines(found), notes, here)


@task(
    auto_shortflags=False,
    help={"model": "OWNER/NAME on the Hub, or a shipped model", "name": "of the recipe; without it the model's own"},
)
def add(c: Context, model: str, name: str = "") -> None:
    """Write a model's recipe as a file to edit; one of the Hub is proved first."""
    with sentences():
        from inventory.settings import load_settings
        from training.laptop.models import adding

        named = adding.new_name(model, name)
        if shipped := adding.shipped_name(model):
            path, text = adding.write_shipped(shipped, named)
            say(text.rstrip())
        else:
            say(f"looking up {model}, counting its layers and proving its type on a small copy: half a minute")
            path, text, found = adding.add(model, named)
            say(text.rstrip())
            say(f"proved: {', '.join(f'{proof} {value:.0e}' for proof, value in found.items())}")
        say(f"written to {path}; edit it as you like")
        say(f'next: add "{path.stem}" to [models] names in cluster.toml; {load_settings().deploy_command}; then')
        say(f"      fab train --model {path.stem} --data FILE")


@task(
    auto_shortflags=False,
    help={
        "model": "recipe, OWNER/NAME, or a folder's name below /data/models",
        "here": "the one of this machine, for --here",
        "force": "even where runs were trained from it",
        "yes": "do not ask",
    },
)
def delete(c: Context, model: str, here: bool = False, force: bool = False, yes: bool = False) -> None:
    """Remove a base model that nothing uses from all nodes' disks."""
    with sentences("interrupted; a model that is left in part is made whole by the base deploy, or deleted again"):
        from training.laptop.models import deleting
        from training.laptop.open_cluster import opened

        with opened(here) as cluster:
            going = deleting.planned(cluster, model, force)
            say("\n".join(going.lines))
            ask(yes, "delete it?", yes_command(f"models.delete {model}", delete, here=here, force=force))
            failed = deleting.delete(cluster, going)
    if failed:
        raise Exit("; ".join(f"{name}: {why}" for name, why in failed.items()), code=1)
    say(f"deleted {going.folder}")


models = Collection("models", list_models, add, delete)
namespace = Collection(models)
