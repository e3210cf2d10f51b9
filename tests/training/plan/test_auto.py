"""What a recipe leaves to the plan: decided before the launch, from the facts the rest of the plan is made from."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.training.plan.test_checks import facts
from training.cost.cards import Rates, card_bytes, sustained_flops
from training.cost.memory import GIB
from training.cost.shape import PlanError, known_shape
from training.laptop import new_run, open_cluster, preparing, resume_run, start_run
from training.laptop.base_model import BaseModel
from training.laptop.head_node import HereHead
from training.laptop.open_cluster import Session
from training.laptop.resume_run import SettingChange, changed_recipe
from training.models.names import load_recipe, recipe_names
from training.plan.facts import Card
from training.plan.machines import PlannedMachines, Workload, room
from training.plan.notes import MIXTURES
from training.plan.predict import make_plan
from training.plan.refit import RunMachines, layout_keys, machines_text, parse_machines, refit
from training.recipe.base import Base
from training.recipe.reading import read_recipe, with_changes
from training.recipe.recipe import LEFT_TO_THE_PLAN, RecipeError
from training.run.launch import LaunchError

SAID = {"strategy": "zero3", "micro_batch": "1", "gradient_checkpointing": "true"}
ALL = {"strategy": "auto", "micro_batch": "auto", "gradient_checkpointing": "auto"}


def test_auto_is_a_value_of_three_keys_and_leaves_the_leanest_until_it_is_decided():
    recipe = load_recipe("qwen2.5-7b", ALL)
    assert recipe.auto == ("strategy", "micro_batch", "gradient_checkpointing")
    assert (recipe.strategy, recipe.micro_batch, recipe.gradient_checkpointing) == ("zero3", 1, True)
    with pytest.raises(RecipeError, match="max_length"):
        load_recipe("qwen2.5-7b", {"max_length": "auto"})


def test_it_is_no_part_of_the_maths_and_comes_back_as_it_was_written(tmp_path: Path):
    recipe = load_recipe("qwen2.5-7b", ALL)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(tmp_path / "recipe.toml") == recipe
    assert recipe.compute_hash() == load_recipe("qwen2.5-7b").compute_hash()


def test_a_recipe_without_it_is_planned_as_it_stands():
    recipe = load_recipe("qwen2.5-14b", SAID)
    plan = make_plan(recipe, facts())
    assert plan.recipe == recipe and "chosen" not in plan.predicted


def test_the_plan_decides_what_is_left_to_it_and_predicts_with_that():
    known = facts()
    plan = make_plan(load_recipe("qwen2.5-14b", ALL), known)
    as_it_stands = make_plan(load_recipe("qwen2.5-14b", SAID), known)
    assert plan.recipe.auto == () and plan.errors == []
    assert plan.predicted["chosen"]["settings"] == {
        "strategy": plan.recipe.strategy,
        "micro_batch": plan.recipe.micro_batch,
        "gradient_checkpointing": plan.recipe.gradient_checkpointing,
        **{f"pipeline.{key}": list(value) if key != "stages" else value for key, value in plan.recipe.pipeline},
    }
    assert plan.predicted["step_s"] < as_it_stands.predicted["step_s"]
    assert plan.predicted == make_plan(plan.recipe, known).predicted | {"chosen": plan.predicted["chosen"]}
    assert plan.predicted["chosen"]["reason"] == "pipeline is the fastest that fits"


def test_the_shipped_recipe_on_four_a10_nodes_with_strategy_auto_alone_is_a_pipeline():
    slow = replace(facts(), bytes_per_s=1.7e9)
    careful = {"strategy": "zero3", "micro_batch": "1", "gradient_checkpointing": "true"}
    plan = make_plan(load_recipe("qwen2.5-14b", careful | {"strategy": "auto"}), slow)
    table = plan.recipe.pipeline
    assert (plan.recipe.strategy, plan.errors, sum(table.layers)) == ("pipeline", [], 48)
    assert plan.recipe.gradient_checkpointing is True and table.checkpointed == table.layers
    assert plan.predicted["chosen"]["settings"]["pipeline.layers"] == list(table.layers)
    divided = make_plan(load_recipe("qwen2.5-14b", careful), slow)
    assert plan.predicted["step_s"] < divided.predicted["step_s"] / 4


def test_experts_are_not_gathered_over_ethernet_where_stages_hold_them():
    """Thirty thousand million parameters of which a token meets a tenth: gathering all of them takes minutes a step."""
    ethernet = replace(facts(), shape=known_shape(Base.parse("Qwen/Qwen3-30B-A3B-Instruct-2507")), bytes_per_s=1.7e9)
    plan = make_plan(load_recipe("qwen3-30b-a3b"), ethernet)
    assert (plan.recipe.strategy, plan.errors, sum(plan.recipe.pipeline.layers)) == ("pipeline", [], 48)
    (time,) = [check for check in plan.checks if check.name == "time"]
    assert time.severity == "warning" and MIXTURES in time.value
    divided = make_plan(load_recipe("qwen3-30b-a3b", SAID), ethernet)
    assert divided.predicted["step_s"] > 20 * plan.predicted["step_s"]


def test_a_pipeline_that_is_named_gets_what_its_table_leaves_empty():
    given = {"strategy": "pipeline", "micro_batch": "1", "gradient_checkpointing": "auto"}
    plan = make_plan(load_recipe("qwen2.5-14b", given), facts())
    assert plan.recipe.left_open == () and plan.recipe.pipeline.layers == (11, 12, 14, 11)
    assert plan.predicted["chosen"]["settings"].keys() == {
        "gradient_checkpointing",
        *(f"pipeline.{key}" for key in ("stages", "layers", "checkpointed", "held")),
    }
    part = make_plan(load_recipe("qwen2.5-14b", given | {"pipeline.layers": "[12,12,12,12]"}), facts())
    assert part.recipe.pipeline.layers == (12,) * 4 and "pipeline.layers" not in part.predicted["chosen"]["settings"]
    whole = make_plan(plan.recipe, facts())
    assert whole.recipe == plan.recipe and "chosen" not in whole.predicted


def test_a_table_that_is_not_for_these_ranks_ends_the_plan_in_a_sentence():
    table = {"stages": 3, "layers": (16,) * 3, "checkpointed": (0,) * 3, "held": (3, 2, 1)}
    with pytest.raises(
        PlanError, match=r"^4 ranks are no multiple of 3 stages: set pipeline\.stages to a divisor of 4$"
    ):
        make_plan(with_changes(load_recipe("qwen2.5-14b"), strategy="pipeline", pipeline=table), facts())


@pytest.mark.parametrize(
    ("fixed", "open_"),
    [
        ({"strategy": "zero3"}, {"micro_batch", "gradient_checkpointing"}),
        ({"strategy": "zero2", "micro_batch": 4}, {"gradient_checkpointing"}),
        ({"micro_batch": 2, "gradient_checkpointing": True}, {"strategy"}),
    ],
)
def test_what_the_recipe_says_is_kept(fixed, open_):
    given = {key: str(value).lower() for key, value in fixed.items()} | dict.fromkeys(open_, "auto")
    plan = make_plan(load_recipe("qwen2.5-0.5b", given), facts())
    assert {key: getattr(plan.recipe, key) for key in fixed} == fixed
    assert plan.predicted["chosen"]["settings"].keys() == open_


def test_where_nothing_fits_the_plan_says_so_as_ever():
    small = replace(facts(), card=Card("NVIDIA A10", 4 * GIB))
    plan = make_plan(load_recipe("qwen2.5-14b", ALL), small)
    assert plan.recipe.auto == () and plan.recipe.strategy == "pipeline"
    assert [error.split(":")[0] for error in plan.errors] == ["GPU memory"]
    assert plan.predicted["chosen"]["reason"].startswith("nothing fits: ")


def test_the_run_folder_has_the_recipe_as_it_was_decided_and_the_plan_says_why(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(start_run, "find_base_model", lambda *_: BaseModel({"hash": "0" * 64}))
    monkeypatch.setattr(start_run, "remember", lambda *_: False)
    monkeypatch.setattr(preparing, "prepare", lambda *_: {})
    monkeypatch.setattr(start_run, "read_facts", lambda *_: facts())
    recipe, run_id = load_recipe("qwen2.5-14b", ALL), "qwen2.5-14b-20260101-000000"
    cluster = Session(HereHead(tmp_path / "runs"))
    monkeypatch.setattr(HereHead, "start_early", lambda *_: None)
    monkeypatch.setattr(HereHead, "start", lambda *_, **__: None)
    start_run.start(cluster, start_run.StartRequest(recipe, new_run.TrainingData({})), datetime(2026, 1, 1, tzinfo=UTC))
    folder = tmp_path / "runs" / run_id
    chosen = json.loads((folder / "plan.json").read_text())["predicted"]["chosen"]
    assert read_recipe(folder / "recipe.toml") == with_changes(recipe, **chosen["settings"], auto=())
    said = ", ".join(f"{key} = {value}" for key, value in chosen["settings"].items())
    assert "pipeline.layers = [11, 12, 14, 11], " in said
    assert f"chosen: {said}; pipeline is the fastest that fits" in capsys.readouterr().out


def test_the_shipped_recipes_leave_it_to_the_plan_and_a_value_overrules():
    for name in recipe_names():
        recipe = load_recipe(name)
        assert set(recipe.auto) == (set() if name == "tiny" else set(ALL)), name
        named = load_recipe(name, {"strategy": "zero2", "micro_batch": "2"})
        assert (named.strategy, named.micro_batch) == ("zero2", 2) and not {"strategy", "micro_batch"} & set(named.auto)


def test_a_key_that_is_changed_is_no_longer_the_plans():
    changed = with_changes(load_recipe("qwen2.5-7b"), micro_batch=4)
    assert changed.micro_batch == 4 and changed.auto == ("strategy", "gradient_checkpointing")


def test_where_neither_card_nor_network_is_known_it_is_always_the_same_and_says_what_it_assumed():
    unknown = replace(facts(), card=Card("Unheard X1", 80 * GIB), bytes_per_s=None)
    plans = [make_plan(load_recipe("qwen2.5-7b"), unknown) for _ in range(2)]
    assert plans[0].recipe == plans[1].recipe and plans[0].recipe.strategy == "zero0"
    reason = plans[0].predicted["chosen"]["reason"]
    assert "taking a card for 40 TFLOP/s: fab prove measures it; taking the network for 16 Gbit/s: " in reason
    assert plans[0].predicted["step_s"] is None
    (rates,) = [check.value for check in plans[0].checks if check.name == "rates"]
    assert rates == "computing not known; network not measured yet (fab check)"


RESUMED = load_recipe("qwen2.5-14b", {"strategy": "zero0", "micro_batch": "2", "gradient_checkpointing": "0"})
WORK = Workload(300, 600_000, 2048)


def test_a_resume_keeps_what_fits_and_decides_anew_what_does_not():
    shape = known_shape(RESUMED.base_model)
    large = machines_of("NVIDIA A100", 1)
    now = refit(RESUMED, shape, large, WORK, LEFT_TO_THE_PLAN)
    assert (now.recipe, now.fits, now.reason) == (RESUMED, True, "")
    now = refit(RESUMED, shape, machines_of("NVIDIA A10", 4), WORK, LEFT_TO_THE_PLAN)
    after, reason = now.recipe, now.reason
    assert after.strategy == "pipeline" and after.compute_keys() == RESUMED.compute_keys() and after.left_open == ()
    assert "iB of memory are missing a rank on 4 ranks" in reason
    assert reason.endswith("pipeline is the fastest that fits")


def test_a_resume_leaves_alone_what_the_recipe_said_itself():
    shape, small = known_shape(RESUMED.base_model), machines_of("NVIDIA A10", 4)
    assert refit(RESUMED, shape, machines_of("NVIDIA A100", 1), WORK, ()).fits
    for left in ((), ("gradient_checkpointing",)):
        now = refit(RESUMED, shape, small, WORK, left)
        assert (now.recipe, now.fits, "nothing fits" in now.reason) == (RESUMED, False, bool(left))


def test_a_pipeline_that_is_named_at_a_resume_is_laid_out_as_one_that_starts():
    shape, small = known_shape(RESUMED.base_model), machines_of("NVIDIA A10", 4)
    named = with_changes(RESUMED, strategy="pipeline", micro_batch=1, gradient_checkpointing=48)
    now = refit(named, shape, small, WORK, named.left_open)
    after, reason = now.recipe, now.reason
    assert after.pipeline.layers == after.pipeline.checkpointed == (25, 23) and after.left_open == ()
    assert (after.micro_batch, after.gradient_checkpointing) == (1, 48), "which nobody asked to decide"
    assert reason == "pipeline is what the recipe names, in the fastest way that fits"
    again = refit(after, shape, small, WORK, after.left_open)
    assert (again.recipe, again.reason) == (after, "")


def machines_of(card, ranks):
    has = card_bytes(card)
    usable, spare = room(has, gpu=True)
    return PlannedMachines(ranks, 1, card, has, usable, spare, 125 * GIB, Rates(sustained_flops(card), 1.7e9))


def test_a_run_that_goes_on_elsewhere_has_its_new_recipe_beside_the_one_it_had(tmp_path: Path, monkeypatch, capsys):
    plan = make_plan(load_recipe("qwen2.5-14b"), facts())
    folder = tmp_path / "runs" / "qwen2.5-14b-20260101-000000"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RESUMED.to_toml())
    (folder / "plan.json").write_text(json.dumps({"predicted": plan.predicted, "data": plan.data}))
    cluster = Session(HereHead(tmp_path / "runs"))
    launch = cluster.launch_of(folder.name, "training.node.finetune")
    nodes = open_cluster.hardware_of_nodes(cluster.head, launch)
    its = RunMachines(nodes, preparing.measured_speeds(cluster, launch, nodes))
    assert parse_machines(machines_text(its)) == its and its.of(["localhost"]).ram_bytes > GIB
    with pytest.raises(ValueError):
        its.of(["localhost", "te9"])

    def fitted(*said: str, step: int = 10) -> SettingChange:
        return resume_run.fitted(cluster.head, launch, its, SettingChange(), step=step, overridden=said)

    monkeypatch.setattr(RunMachines, "of", lambda *_: machines_of("NVIDIA A100", 1))
    (left,) = fitted().files.items()
    assert left[0] == "plan.json" and json.loads(left[1])["predicted"]["step_s"] is None, "of other cards"
    monkeypatch.setattr(RunMachines, "of", lambda *_: machines_of("NVIDIA A10", 4))
    change = fitted()
    assert change.kept == "recipe.before-10.toml" and change.files[change.kept] == RESUMED.to_toml()
    assert 'strategy = "pipeline"' in change.files["recipe.toml"] and not change.of_data
    said = capsys.readouterr().out
    assert (
        said.startswith("from step 10 on: strategy = pipeline, micro_batch = ") and "iB of memory are missing" in said
    )
    kept = fitted(*ALL)
    assert kept == SettingChange(), "what is said for the resume stays"
    last = RESUMED.total_steps(plan.data["rows"])
    with pytest.raises(LaunchError):  # nothing would be left to learn
        fitted("epochs", step=last)
    fitted("epochs", step=last - 1)
    fitted(step=last)


@pytest.mark.parametrize("checkpointing", ["auto", "true"])
def test_a_pipeline_is_laid_out_again_for_ranks_that_cannot_be_its_stages(checkpointing):
    given = {"strategy": "pipeline", "gradient_checkpointing": checkpointing, "pipeline.stages": "4"}
    plan, shape = make_plan(load_recipe("qwen2.5-14b", given), facts()), known_shape(RESUMED.base_model)
    assert plan.recipe.pipeline.stages == 4
    assert layout_keys(plan.recipe, shape, 8) == (), "two copies"
    assert layout_keys(RESUMED, shape, 6) == ()
    left = [*plan.predicted["chosen"]["settings"], *layout_keys(plan.recipe, shape, 6)]
    assert "pipeline.stages" in left
    now = refit(plan.recipe, shape, machines_of("NVIDIA A10", 6), WORK, left)
    found, reason = now.recipe, now.reason
    assert found.pipeline.stages in {2, 3, 6} and sum(found.pipeline.layers) == 48 and found.left_open == ()
    assert "6 ranks are no multiple of 4 stages" in reason
    if checkpointing == "true":
        assert found.gradient_checkpointing is True and found.pipeline.checkpointed == found.pipeline.layers
    else:
        assert found.gradient_checkpointing == sum(found.pipeline.checkpointed) < 48


def test_a_resumed_run_keeps_what_was_decided_and_takes_no_auto():
    plan = make_plan(load_recipe("qwen2.5-14b", ALL), facts())
    text = plan.recipe.to_toml()
    assert changed_recipe(text, {}, 10, force=False).files == {}
    assert changed_recipe(text, {"micro_batch": "2"}, 10, force=False).files
    with pytest.raises(LaunchError, match=r"^strategy: auto is for a run's start; name a value, which fab plan tells$"):
        changed_recipe(text, {"strategy": "auto"}, 10, force=True)
