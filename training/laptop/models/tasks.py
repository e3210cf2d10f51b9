"""fab models / models.add."""

from __future__ import annotations

from invoke import Collection, Context, task

from inventory.command_line import say, sentences


@task(
    auto_shortflags=False,
    name="list",
    default=True,
    help={"here": "models of this machine, for --here", "json": "print it for other programs"},
)
def list_models(c: Context, here: bool = False, json: bool = False) -> None:
    """Every recipe with its model: how large it is, whether it lies on the head, how it fits these machines."""
    with sentences():
        from training.laptop.models import around, table

        at, there, notes = around.asked(here)
        found = table.rows(at, there)
        if json:
            say(table.as_json(found))
            return
        if there and (others := table.without_recipe(there)):
            notes.append(f"on the head without a recipe: {', '.join(others)}")
        around.show(table.lines(found), notes)


@task(
    auto_shortflags=False,
    help={"model": "OWNER/NAME on the Hub", "name": "of the recipe; without it the model's own"},
)
def add(c: Context, model: str, name: str = "") -> None:
    """Look a model up on the Hub, prove its type on a small copy, and write a recipe for it to edit."""
    with sentences():
        from training.laptop.models import adding

        say(f"looking up {model}, counting its layers and proving its type on a small copy: half a minute")
        path, text, found = adding.add(model, name)
        say(text.rstrip())
        say(f"proved: {', '.join(f'{proof} {value:.0e}' for proof, value in found.items())}")
        say(f"written to {path}; edit it as you like")
        say(f'next: add "{path.stem}" to [models] names in cluster.toml and run the base deploy; then')
        say(f"      fab train --model {path.stem} --data FILE")


models = Collection("models", list_models, add)
namespace = Collection(models)
