"""A run's folder as `fab train` leaves it for its supervisor: recipe, plan, and what its nodes have."""

import json
from dataclasses import replace

from tests.training.plan.test_checks import facts
from training.cost.memory import GIB
from training.cost.shape import known_shape
from training.models.names import load_recipe
from training.plan.facts import Card, Known, NodeHardware
from training.plan.predict import make_plan
from training.plan.refit import RunMachines, machines_text
from training.run.folder import MACHINES, PLAN, RECIPE


def plan_run(folder, model="qwen2.5-7b", nodes=("te1", "te2", "te3", "te4"), **settings):
    """Of one A10 a node, planned for four of them."""
    recipe = load_recipe(model, {key: str(value) for key, value in settings.items()})
    made = make_plan(recipe, replace(facts(), shape=known_shape(recipe.base_model)))
    cards = (Card("NVIDIA A10", 24 * GIB),)
    machines = RunMachines(tuple(NodeHardware(name, 1, cards, 30 * GIB) for name in nodes), Known(1.7e9, "check-1"))
    (folder / RECIPE).write_text(made.recipe.to_toml())
    (folder / PLAN).write_text(json.dumps({"predicted": made.predicted, "data": made.data}))
    (folder / MACHINES).write_text(machines_text(machines))
