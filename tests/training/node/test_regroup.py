"""With which nodes a run goes on that lost some, and how."""

import json
from dataclasses import replace

import pytest

from tests.support.planned_run import plan_run
from training.node.supervision.failure import Verdict
from training.node.supervision.regroup import FUTILE, Attempts, CannotGoOn, Misfit, Remains, regrouped, remaining
from training.plan.refit import fewest_nodes, parse_machines, parse_start_plan
from training.recipe.reading import read_recipe
from training.run.causes import Cause
from training.run.launch import Host, Launch, parse_launch
from training.run.notices import EVERYBODY

NAMES = ("te1", "te2", "te3", "te4")
HOSTS = tuple(Host(name, f"10.0.0.{n}", 1, price_h=1.5) for n, name in enumerate(NAMES, 1))
LAUNCH = Launch("tiny-20260101-000000", "", HOSTS, "training.node.finetune", (), "python", {}, price_h=6.0)


def left(kind, silent=(), leaving=(), back=(), launch=LAUNCH):
    """Names of the nodes that a run goes on with which ended by this."""
    return [host.name for host in remains(kind, silent, leaving, back, launch).hosts]


def remains(kind, silent=(), leaving=(), back=(), launch=LAUNCH):
    end = Verdict("failed", cause=Cause(kind))
    return remaining(launch.hosts, end, silent=silent, back=back, leaving=leaving)


@pytest.mark.parametrize(
    ("kind", "silent", "leaving", "goes_on_with"),
    [
        ("node_lost", ["te3"], [], ["te1", "te2", "te4"]),
        ("node_lost", ["te2", "te3"], [], ["te1", "te4"]),
        ("reclaimed", [], ["te2", "te3", "te4"], ["te1"]),
        ("reclaimed", [], ["te2"], ["te1", "te3", "te4"]),
        ("reclaimed", ["te4"], ["te2"], ["te1", "te3"]),
        ("reclaimed", [], ["te1", "te2"], []),  # the head
        ("released", [], [EVERYBODY], []),
        ("reclaimed", [], ["te2", EVERYBODY], []),
        ("not_ready", ["te2"], [], ["te1", "te3", "te4"]),
        ("peer_lost", ["te2"], [], ["te1", "te3", "te4"]),
        ("peer_lost", [], [], list(NAMES)),
        *((kind, ["te2"], [], ["te1", "te3", "te4"]) for kind in ("hung", "gpu_failed")),
        ("unheard", ["te2"], [], ["te1", "te3", "te4"]),
        *((kind, ["te2"], [], []) for kind in ("none", "unknown", "diverged", "out_of_gpu_memory", "killed")),
        *((kind, ["te2"], [], []) for kind in ("unusable", "disk_full", "crashed")),
    ],
)
def test_a_run_goes_on_without_the_nodes_that_are_gone_and_after_no_other_end(kind, silent, leaving, goes_on_with):
    assert left(kind, silent, leaving) == goes_on_with


def test_a_node_that_answers_again_stays():
    assert left("node_lost", ["te3"], back=["te3"]) == list(NAMES)
    assert left("node_lost", ["te2", "te3"], back=["te3"]) == ["te1", "te3", "te4"]
    assert remains("not_ready", ["te2"], back=["te2"]) == Remains(HOSTS, steady=(HOSTS[0], *HOSTS[2:]))


def test_a_node_that_answers_is_left_out_once_it_is_named_twice_or_its_card_is_broken():
    hung, broken = Verdict("failed", "", Cause("hung"), node="te3"), Cause("gpu_failed", xid=79)
    for end, suspected, names in (
        (hung, [], NAMES),
        (hung, ["te2"], NAMES),
        (hung, ["te3"], ("te1", "te2", "te4")),
        (replace(hung, cause=broken), [], ("te1", "te2", "te4")),
        (replace(hung, cause=broken, node="te1"), [], ()),
        (replace(hung, node="te1"), ["te1"], NAMES),
        (replace(hung, node=None), [""], NAMES),
        (replace(hung, cause=Cause("peer_lost")), ["te3"], NAMES),  # it told that it heard no other
        (replace(hung, cause=Cause("peer_lost", peer=2)), ["te3"], ("te1", "te2", "te4")),
    ):
        left = remaining(HOSTS, end, silent=(), back=(), leaving=(), suspected=suspected)
        assert tuple(host.name for host in left.hosts) == names, (end, suspected)


def test_all_others_at_once_may_come_back_to_a_head_that_was_cut_off():
    assert remains("node_lost", ["te2", "te3", "te4"]) == Remains(HOSTS[:1], True, HOSTS[:1])
    some = remains("node_lost", ["te2", "te3", "te4"], back=["te3"])
    assert some == Remains((HOSTS[0], HOSTS[2]), True, HOSTS[:1])
    assert not remains("node_lost", ["te2", "te3", "te4"], back=["te2", "te3", "te4"]).cut_off
    assert not remains("reclaimed", ["te2", "te3"], ["te2"], launch=replace(LAUNCH, hosts=HOSTS[:3])).cut_off


def test_of_two_nodes_the_head_goes_on_alone():
    assert left("node_lost", ["te2"], launch=replace(LAUNCH, hosts=HOSTS[:2])) == ["te1"]


def test_only_a_newer_checkpoint_is_progress():
    attempts = Attempts(None)
    assert [attempts.take(step) for step in (None, 10, 10, 10)] == [True, True, True, True]
    assert attempts.futile == FUTILE - 1 and attempts.take(20) and attempts.futile == 0
    assert [attempts.take(20) for _ in range(FUTILE)] == [True] * (FUTILE - 1) + [False]


@pytest.fixture
def run(tmp_path):
    """A launch whose folder has a checkpoint of step 20."""
    (tmp_path / "checkpoints" / "step-20").mkdir(parents=True)
    return replace(LAUNCH, run_dir=str(tmp_path))


def test_what_fits_stays_and_costs_less(run, tmp_path):
    plan_run(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    launch = regrouped(run, HOSTS[:2], 0.7)
    assert parse_launch((tmp_path / "launch.json").read_text()) == launch
    assert launch == replace(run, hosts=HOSTS[:2], arguments=("--resume",), price_h=3.0, spent_before=0.7)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name in before} == before
    forced = regrouped(replace(run, arguments=("--resume", "--force")), HOSTS, 0.0)
    assert forced.arguments == ("--resume", "--force")


def test_a_run_without_a_checkpoint_begins_again(run, tmp_path):
    plan_run(tmp_path)
    (tmp_path / "checkpoints" / "step-20").rmdir()
    assert regrouped(run, HOSTS[:3], 0.0).arguments == ()


def test_what_was_left_to_the_plan_is_decided_anew_where_it_does_not_fit_fewer_nodes(run, tmp_path):
    plan_run(tmp_path, "qwen2.5-14b", strategy="pipeline")
    before = read_recipe(tmp_path / "recipe.toml")
    launch = regrouped(run, HOSTS[:3], 0.0)
    after, kept = (read_recipe(tmp_path / name) for name in ("recipe.toml", "recipe.before-20.toml"))
    assert kept == before and sum(before.pipeline.layers) == sum(after.pipeline.layers) == 48
    assert (len(before.pipeline.layers), len(after.pipeline.layers), launch.world_size) == (4, 3, 3)
    assert after.compute_keys() == before.compute_keys()
    assert json.loads((tmp_path / "plan.json").read_text())["predicted"]["step_s"] is None
    regrouped(replace(run, hosts=HOSTS[:3]), HOSTS[:2], 0.0)
    assert read_recipe(tmp_path / "recipe.before-20.toml") == before  # the first one of this step


@pytest.mark.parametrize("damaged", ["plan.json", "machines.json", "recipe.toml"])
def test_what_does_not_fit_or_cannot_be_read_is_left_as_it_is(run, tmp_path, damaged):
    plan_run(tmp_path, "qwen2.5-14b")
    with pytest.raises(Misfit):
        regrouped(run, HOSTS[:1], 0.0)
    (tmp_path / damaged).write_text("{")
    with pytest.raises(CannotGoOn):
        regrouped(run, HOSTS[:3], 0.0)
    assert not (tmp_path / "launch.json").exists()


@pytest.mark.parametrize(
    ("model", "settings", "least"),
    [
        ("qwen2.5-7b", {}, 1),
        ("qwen2.5-14b", {}, 2),
        ("qwen2.5-14b", {"strategy": "zero0"}, 1),  # which lacks as much on four
        ("qwen2.5-32b", {"strategy": "zero3"}, 4),
    ],
)
def test_of_how_many_nodes_a_run_needs_each_is_known_at_its_start(tmp_path, model, settings, least):
    plan_run(tmp_path, model, **settings)
    plan, machines = ((tmp_path / name).read_text() for name in ("plan.json", "machines.json"))
    recipe = read_recipe(tmp_path / "recipe.toml")
    assert fewest_nodes(parse_start_plan(json.loads(plan)), recipe, parse_machines(machines)) == least


def test_what_fitted_no_better_before_goes_on(run, tmp_path):
    plan_run(tmp_path, "qwen2.5-14b", strategy="zero0")
    assert regrouped(run, HOSTS[:3], 0.0).hosts == HOSTS[:3]
    plan_run(tmp_path, "qwen2.5-14b", strategy="zero3")
    with pytest.raises(Misfit):
        regrouped(run, HOSTS[:1], 0.0)
