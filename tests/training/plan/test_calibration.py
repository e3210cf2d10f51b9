"""The plan goes by what was measured on these machines, and says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.heads import cluster_of
from tests.training.plan import test_checks as plan_checks
from training.laptop import preparing
from training.laptop.head_node import HereHead
from training.models.names import load_recipe
from training.plan import calibration
from training.plan.calibration import Calibration, Ranks
from training.plan.facts import Card, Facts, NodeHardware
from training.plan.predict import make_plan
from training.run.launch import Host, Launch

MADE = Calibration(
    run_id="prove-20260101-000000",
    cluster="mine",
    time=100.0,
    world_size=2,
    card="NVIDIA A10",
    matmul_flops=56e12,
    memory_bytes_per_s=4.7e11,
    link_bytes_per_s=1.5e9,
)
HOSTS = (Host("te1", "10.0.0.1", 1), Host("te2", "10.0.0.2", 1))
A10S = [NodeHardware(host.name, 1, (Card("NVIDIA A10", 24e9),), 60e9) for host in HOSTS]
SWEEP = {"operation": "all_gather", "bytes": 4096, "seconds": 1e-3, "algbw_gbyte_s": 2.5, "busbw_gbyte_s": 1.25}
TWO = Launch("tiny-20260101-000000", "/data/runs/x", HOSTS, "training.node.finetune", (), "python", {})


@pytest.fixture
def facts():
    return plan_checks.facts()


def test_it_comes_back_as_it_was_written():
    assert calibration.parse_calibration(calibration.calibration_text(MADE)) == MADE


def test_one_of_before_the_losses_were_timed_is_read():
    older = {
        name: value
        for name, value in json.loads(calibration.calibration_text(MADE)).items()
        if not name.endswith("_loss_s")
    }
    assert calibration.parse_calibration(json.dumps(older)) == MADE


@pytest.mark.parametrize(
    ("own", "ligers", "card", "ours"),
    [
        (0.010, 0.012, "NVIDIA A10", True),
        (0.012, 0.010, "NVIDIA A10", False),
        (0.010, 0.012, "NVIDIA H20", False),
        (0.010, None, "NVIDIA A10", False),
    ],
    ids=["ours is faster", "theirs is", "another card", "only ours was there"],
)
def test_the_faster_loss_of_these_cards_goes_into_the_plan(facts: Facts, own, ligers, card, ours):
    made = replace(MADE, own_loss_s=own, liger_loss_s=ligers, card=card)
    assert calibration.parse_calibration(calibration.calibration_text(made)) == made
    assert make_plan(load_recipe("qwen2.5-14b"), replace(facts, calibration=made)).predicted["own_loss"] is ours


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"run_id": "x"}), "{cut"])
def test_what_is_no_calibration_is_refused(content: str):
    with pytest.raises(ValueError):
        calibration.parse_calibration(content)


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^matmul_flops is 0.0: at least 1e\+09 is expected$"):
        calibration.parse_calibration(calibration.calibration_text(replace(MADE, matmul_flops=0.0)))


@pytest.mark.parametrize(
    "change",
    [
        {"matmul_flops": None},
        {"matmul_flops": 8},
        {"matmul_flops": float("nan")},
        {"memory_bytes_per_s": None},
        {"memory_bytes_per_s": 1e14},
        {"link_bytes_per_s": 100.0},
        {"time": None},
        {"time": "100"},
        {"world_size": 2.5},
        {"card": ["NVIDIA A10"]},
        {"cluster": None},
        {"nodes": ["te1", 2]},
        {"nodes": "te1"},
        {"ram_bytes": -1},
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"^{name} is "):
        calibration.parse_calibration(json.dumps(json.loads(calibration.calibration_text(MADE)) | change))


def test_one_of_before_names_and_ram_were_kept_is_read():
    older = {
        name: v
        for name, v in json.loads(calibration.calibration_text(MADE)).items()
        if name not in {"nodes", "ram_bytes"}
    }
    assert calibration.parse_calibration(json.dumps(older)) == MADE
    named = replace(MADE, nodes=("te1", "te2"), ram_bytes=60e9)
    assert calibration.parse_calibration(calibration.calibration_text(named)) == named


TWO_A10 = Ranks("mine", 2, ("A10",), frozenset({"te1", "te2"}))


@pytest.mark.parametrize(
    "change",
    [{"cluster": "other"}, {"count": 4}, {"cards": ("H20",)}, {"cards": ()}, {"cards": ("A10", "H20")}],
    ids=["a cluster", "a number", "a card", "CPUs", "a card besides"],
)
def test_the_link_of_other_ranks_says_nothing(change):
    assert MADE.link(TWO_A10) == 1.5e9
    assert MADE.link(replace(TWO_A10, **change)) is None


def test_nor_does_that_of_other_nodes_where_their_names_were_kept():
    named = replace(MADE, nodes=("te2", "te1"))
    assert named.link(TWO_A10) == named.link(replace(TWO_A10, nodes=frozenset())) == 1.5e9
    assert named.link(replace(TWO_A10, nodes=frozenset({"te1", "te3"}))) is None


def computing(facts: Facts) -> tuple[float | None, str]:
    return facts.machines.rates.flops, facts.machines.flops_from


def test_a_measured_card_is_planned_with_its_measured_rate(facts: Facts):
    flops, known_from = computing(replace(facts, calibration=MADE))
    assert flops == pytest.approx(0.6 * 56e12)
    assert known_from == "measured by prove-20260101-000000"
    assert computing(facts) == (40e12, "the table of cards")
    other = computing(replace(facts, calibration=replace(MADE, card="NVIDIA H20")))
    assert other == computing(facts), "another card's rate says nothing of this one"


def test_cpus_that_were_measured_give_seconds_whatever_the_number_type(facts: Facts):
    on_cpus = replace(facts, card=None, calibration=replace(MADE, card=None, matmul_flops=2e11))
    assert computing(on_cpus) == (pytest.approx(0.6 * 2e11), "measured by prove-20260101-000000")
    assert computing(replace(facts, card=None)) == computing(replace(facts, card=None, calibration=MADE)) == (None, "")
    sixteen, thirty_two = (
        make_plan(load_recipe("qwen2.5-14b", {"strategy": "zero0", "dtype": dtype}), on_cpus, anyway=True)
        for dtype in ("bfloat16", "float32")
    )
    assert sixteen.predicted["step_s"] == thirty_two.predicted["step_s"] > 100


def test_attention_spans_what_the_samples_are_long_where_that_was_counted(facts: Facts):
    recipe = load_recipe("qwen2.5-14b", {"strategy": "zero2"})
    short, whole, unknown = (
        make_plan(recipe, replace(facts, report={**facts.report, "attention_span": span}), anyway=True).predicted
        for span in (500.0, recipe.max_length, 0.0)
    )
    assert unknown["step_s"] == whole["step_s"] > 1.02 * short["step_s"]


def test_the_plans_table_says_whose_word_it_goes_by(facts: Facts):
    def row(facts: Facts) -> str:
        plan = make_plan(load_recipe("qwen2.5-14b"), facts)
        return next(check.value for check in plan.checks if check.name == "rates")

    assert "computing: the table of cards" in row(replace(facts, link_from="check-1"))
    measured = row(replace(facts, link_from="prove-1", calibration=MADE))
    assert "measured by prove-20260101-000000" in measured and "from prove-1" in measured


def test_the_seconds_follow_the_measured_rate(facts: Facts):
    recipe = load_recipe("qwen2.5-14b", {"strategy": "zero2"})
    slow = replace(MADE, matmul_flops=5.6e12)
    paces = [make_plan(recipe, replace(facts, calibration=made)).predicted["step_s"] for made in (MADE, slow)]
    assert paces[1] == pytest.approx(10 * paces[0], rel=0.05)


def test_the_newest_measurement_of_the_link_counts(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    head = HereHead(tmp_path / "runs")
    place = cluster_of(head)
    folder = head.runs / "check-20260101-000000"
    folder.mkdir(parents=True)
    check = {"run_id": folder.name, "time": 50.0, "backend": "nccl", "world_size": 2, "cluster": "mine", "nodes": []}
    check |= {"checks": [], "pairs": [], "sweep": [SWEEP]}
    (folder / "result.json").write_text(json.dumps(check))
    kept = Path(calibration.calibration_file(head.runs))
    assert preparing.measured_speeds(place, TWO, A10S).link_from == folder.name
    kept.write_text(calibration.calibration_text(MADE))
    known = preparing.measured_speeds(place, TWO, A10S)
    assert (known.bytes_per_s, known.link_from, known.calibration) == (1.5e9, MADE.run_id, MADE)
    kept.write_text(calibration.calibration_text(replace(MADE, time=10.0)))
    assert preparing.measured_speeds(place, TWO, A10S).link_from == folder.name
    kept.write_text(calibration.calibration_text(replace(MADE, world_size=4)))
    assert preparing.measured_speeds(place, TWO, A10S).link_from == folder.name
    kept.write_text("{cut")
    assert preparing.measured_speeds(place, TWO, A10S).calibration is None
    assert "is left out" in capsys.readouterr().err


def test_a_check_of_other_nodes_or_of_ranks_without_cards_is_not_theirs(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = HereHead(tmp_path / "runs")
    folder = head.runs / "check-20260101-000000"
    folder.mkdir(parents=True)
    check = {"run_id": folder.name, "time": 50.0, "backend": "nccl", "world_size": 2, "cluster": "mine"}
    check |= {"checks": [], "pairs": [], "sweep": [SWEEP]}

    def measured(**changes) -> bool:
        (folder / "result.json").write_text(json.dumps(check | changes))
        return preparing.measured_speeds(cluster_of(head), TWO, A10S).link_from == folder.name

    assert measured(nodes=[{"node": "te1"}, {"node": "te2"}]) and measured(nodes=[])
    assert not measured(nodes=[{"node": "te1"}, {"node": "te3"}])
    assert not measured(nodes=[{"node": "te1"}, {"node": "te2"}], backend="gloo")


def test_a_measured_link_counts_on_one_machine_too(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = HereHead(tmp_path / "runs")
    alone = replace(TWO, hosts=(replace(TWO.hosts[0], slots=2),))
    place = cluster_of(head)
    assert preparing.measured_speeds(place, alone, A10S).link_from == preparing.ASSUMED
    head.make_runs()
    Path(calibration.calibration_file(head.runs)).write_text(calibration.calibration_text(MADE))
    assert preparing.measured_speeds(place, alone, A10S).link_from == MADE.run_id
