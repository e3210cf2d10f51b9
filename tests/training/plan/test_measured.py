"""What runs took against their plans: what counts of a run, what later plans make of it, and when a run says so."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.heads import cluster_of
from tests.training.plan import test_checks as plan_checks
from tests.training.plan.test_calibration import MADE, SWEEP
from tests.training.plan.test_options import a10s, tcp
from training.cost.cards import Rates
from training.cost.shape import known_shape
from training.laptop import preparing
from training.laptop.head_node import HeadError, HereHead
from training.laptop.run_look import RunLook, news, off_plan
from training.models.names import load_recipe
from training.node.metrics.against_plan import measured, pace_watch
from training.node.metrics.recorder import Recorder
from training.node.metrics.steps import StepMetrics
from training.plan.calibration import (
    LEAST,
    LEAST_PLANNED_S,
    MOST,
    NEWEST,
    WARM_UP,
    MeasuredRun,
    PaceWatch,
    calibration_file,
    calibration_text,
    corrections,
    measure,
    measured_text,
    parse_measured,
)
from training.plan.facts import Card, NodeHardware
from training.plan.options import choose
from training.plan.predict import make_plan
from training.run.events import EVENTS, MARK, PIPE, OffPlan, Resumed, Told, parse_line, parse_rows, row_of
from training.run.folder import MEASURED, Status, parse_status, status_text
from training.run.launch import Host, Launch, launch_text

RUN = MeasuredRun(
    run_id="qwen2.5-7b-20260101-000000",
    time=100.0,
    strategy="zero0",
    card="NVIDIA A10",
    ranks=4,
    flops=40e12,
    bytes_per_s=1.7e9,
    steps=20,
    step_s=12.0,
    planned_step_s=10.0,
    model_step_s=10.0,
    memory_gib=18.0,
    planned_memory_gib=20.0,
    dtype="bfloat16",
    tuning="lora",
)
PREDICTED = {
    "ranks": 4,
    "card": "NVIDIA A10",
    "step_s": 10.0,
    "model_step_s": 10.0,
    "memory_gib": 20.0,
    "rates": {"flops": 40e12, "bytes_per_s": 1.7e9},
}
KIND, ABOUT = {"strategy": "zero0", "dtype": "bfloat16", "tuning": "lora"}, {"time": 100.0, "ranks": 4}


def rows(*seconds, begin=1):
    return [{"step": step, "loss": 1.0, "step_s": each, "memory_gib": 18.0} for step, each in enumerate(seconds, begin)]


def test_the_first_steps_do_not_poison_the_median():
    found = measure("r", rows(300.0, 90.0, 40.0, *[12.0] * 6), PREDICTED, KIND, **ABOUT)
    assert (found.step_s, found.steps, found.factor) == (12.0, 6, pytest.approx(1.2))
    assert (found.memory_gib, found.planned_memory_gib) == (18.0, 20.0)


def test_one_disturbed_step_in_the_middle_changes_nothing():
    assert measure("r", rows(*[12.0] * 6, 500.0, *[12.0] * 4), PREDICTED, KIND, **ABOUT).step_s == 12.0


def test_of_a_resumed_run_the_last_start_counts_without_its_first_steps():
    taken = rows(*[50.0] * 20, 300.0, 90.0, 40.0, *[12.0] * LEAST)
    assert measure("r", taken, PREDICTED, KIND, **ABOUT, resumed=[20]).step_s == 12.0
    assert measure("r", taken[:-1], PREDICTED, KIND, **ABOUT, resumed=[20]) is None


def test_too_few_steps_and_other_ranks_than_planned_say_nothing():
    assert measure("r", rows(*[12.0] * (WARM_UP + LEAST - 1)), PREDICTED, KIND, **ABOUT) is None
    assert measure("r", rows(*[12.0] * 20), PREDICTED, KIND, **{**ABOUT, "ranks": 2}) is None


def test_a_run_whose_plan_knew_no_seconds_corrects_nothing():
    found = measure("r", rows(*[12.0] * 20), {**PREDICTED, "step_s": None, "model_step_s": None}, KIND, **ABOUT)
    assert found.factor is None and found.step_s == 12.0
    assert corrections([found], "NVIDIA A10", Rates(40e12, 1.7e9), 4).of("zero0", *LORA) is None


def test_the_correction_is_of_the_formulas_not_of_what_an_earlier_one_made_of_them():
    twice = measure("r", rows(*[12.0] * 20), {**PREDICTED, "step_s": 12.0}, KIND, **ABOUT)
    assert twice.planned_step_s == 12.0 and twice.factor == pytest.approx(1.2)


def test_it_comes_back_as_it_was_written_and_what_is_none_is_refused():
    assert parse_measured(measured_text(RUN)) == RUN
    for bad in (
        "",
        "[]",
        "{}",
        "{cut",
        measured_text(replace(RUN, step_s=0.0)),
        measured_text(replace(RUN, bytes_per_s=-1.0)),
    ):
        with pytest.raises(ValueError):
            parse_measured(bad)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time": None}, "time is None: "),
        ({"strategy": ["x"]}, r"strategy is \['x'\]: a text is expected"),
        ({"ranks": 2.5}, "ranks is 2.5: "),
        ({"steps": True}, "steps is True: "),
        ({"step_s": float("inf")}, "step_s is inf: "),
        ({"flops": 8}, r"flops is 8: at least 1e\+09 is expected"),
        ({"card": 7}, "card is 7: a text is expected"),
    ],
)
def test_a_value_that_cannot_be_is_named(change, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        parse_measured(json.dumps(json.loads(measured_text(RUN)) | change))


def test_a_run_of_steps_too_short_to_tell_is_read_and_corrects_nothing():
    for planned in (0.0, 0.0004, 0.99 * LEAST_PLANNED_S):
        tiny = parse_measured(measured_text(replace(RUN, step_s=0.05, planned_step_s=planned, model_step_s=planned)))
        assert corrections([tiny], *HERE).of("zero0", *LORA) is None
        assert not off(PaceWatch(planned), 100.0)
    assert corrections([replace(RUN, model_step_s=LEAST_PLANNED_S)], *HERE).of("zero0", *LORA).factor == MOST


def test_few_seconds_of_a_plan_keep_their_digits():
    fast = replace(plan_checks.facts(), bytes_per_s=1e12, card=Card("NVIDIA H200", 141e9))
    small = {"strategy": "zero0", "max_length": "8", "global_batch": "4", "micro_batch": "1"}
    told = make_plan(load_recipe("qwen2.5-0.5b", small), fast).predicted["step_s"]
    assert told == float(f"{told:.6g}") != round(told, 3)


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"tuning": "full"}])
def test_runs_that_compute_or_tune_otherwise_say_nothing(change):
    assert corrections([replace(RUN, **change)], *HERE).of("zero0", *LORA) is None
    assert corrections([RUN], *HERE).of("zero0", *LORA).factor == pytest.approx(1.2)


HERE = ("NVIDIA A10", Rates(40e12, 1.7e9), 4)
LORA = ("bfloat16", "lora")


def test_the_newest_few_count_and_of_these_the_median():
    slow = [replace(RUN, run_id=f"old-{n}", time=n, step_s=29.0) for n in range(5)]
    new = [replace(RUN, run_id=f"new-{n}", time=100 + n, step_s=s) for n, s in enumerate((11, 12, 13, 12, 100))]
    found = corrections([*new, *slow], *HERE).of("zero0", *LORA)
    assert found.factor == pytest.approx(1.2) and len(found.run_ids) == NEWEST
    assert all(each.startswith("new-") for each in found.run_ids)


def test_a_correction_is_bounded():
    assert corrections([replace(RUN, step_s=900.0)], *HERE).of("zero0", *LORA).factor == MOST
    assert corrections([replace(RUN, step_s=0.1)], *HERE).of("zero0", *LORA).factor == pytest.approx(1 / MOST)


@pytest.mark.parametrize(
    "change",
    [{"card": "NVIDIA H20"}, {"card": None}, {"bytes_per_s": 0.2e9}, {"flops": 60e12}, {"ranks": 1}],
    ids=["another card", "a CPU", "another link", "another rate", "a single rank"],
)
def test_runs_on_other_machines_or_by_other_rates_say_nothing(change):
    assert corrections([replace(RUN, **change)], *HERE).of("zero0", *LORA) is None


def test_of_a_single_rank_the_link_does_not_count():
    alone = replace(RUN, ranks=1, bytes_per_s=None)
    assert corrections([alone], "A10", Rates(40e12, 20e9), 1).of("zero0", *LORA).factor == pytest.approx(1.2)


def test_a_strategy_that_nobody_tried_is_corrected_as_the_others_were():
    found = corrections([RUN, replace(RUN, strategy="zero3", step_s=16.0, run_id="other")], *HERE)
    factors = {strategy: found.of(strategy, *LORA).factor for strategy in ("zero0", "zero3", "zero1")}
    assert factors == pytest.approx({"zero0": 1.2, "zero3": 1.6, "zero1": 1.4})
    assert set(found.of("zero1", *LORA).run_ids) == {RUN.run_id, "other"}


def test_the_next_plan_of_such_machines_goes_by_it_and_says_so():
    known = replace(plan_checks.facts(), bytes_per_s=1.7e9)
    recipe = load_recipe("qwen2.5-14b")
    before = make_plan(recipe, known)
    run = replace(RUN, strategy=recipe.strategy)
    after = make_plan(recipe, replace(known, runs=(run,)))
    assert after.predicted["step_s"] == pytest.approx(1.2 * before.predicted["step_s"], abs=0.001)
    assert after.predicted["model_step_s"] == before.predicted["model_step_s"] == before.predicted["step_s"]
    assert after.predicted["correction"]["run_ids"] == (run.run_id,)
    (rates,) = [check.value for check in after.checks if check.name == "rates"]
    assert rates.endswith(f"; seconds x 1.20, as {run.run_id} took") and "the table of cards" in rates
    assert before.predicted["correction"] is None


def test_the_choice_of_a_strategy_goes_by_what_was_measured_of_each():
    recipe, at = load_recipe("qwen2.5-7b", {"global_batch": "16", "max_length": "2048"}), a10s(4, tcp(16))
    shape = known_shape(recipe.base_model)
    plain = choose(shape, recipe, at)
    assert plain.chosen.strategy == "pipeline"
    runs = [
        replace(RUN, strategy="pipeline", step_s=20.0),
        replace(RUN, strategy="zero2", step_s=9.0, run_id="faster"),
    ]
    link = {"bytes_per_s": at.rates.bytes_per_s}
    corrected = corrections([replace(run, **link) for run in runs], "NVIDIA A10", at.rates, 4)
    told = choose(shape, recipe, replace(at, corrections=corrected))
    assert told.chosen.strategy == "zero2"
    now, was = (next(o for o in c.options if o.strategy == "pipeline") for c in (told, plain))
    assert now.step_s == pytest.approx(2 * was.step_s)


def test_a_run_says_once_that_it_is_more_than_two_fifths_off():
    watch = PaceWatch(10.0)
    told = [watch.take(step, 60.0 if step <= WARM_UP else 14.5) for step in range(1, 30)]
    assert [each for each in told if each] == [OffPlan(WARM_UP + LEAST, 10.0, 14.5)]


@pytest.mark.parametrize(("step_s", "says"), [(14.0, False), (14.1, True), (6.0, False), (5.9, True), (10.0, False)])
def test_two_fifths_is_the_limit_either_way(step_s, says):
    assert off(PaceWatch(10.0), step_s) is says


def test_slow_first_steps_and_a_plan_without_seconds_say_nothing():
    watch = PaceWatch(10.0)
    assert not any(watch.take(step, 100.0 if step <= WARM_UP else 10.0) for step in range(1, 20))
    assert not off(PaceWatch(None))


def off(watch, step_s=100.0):
    """Whether a run of such steps is told to be far from its plan."""
    return any(watch.take(step, step_s) for step in range(1, 20))


HOSTS = tuple(Host(f"te{k}", f"10.0.0.{k}", 1) for k in (1, 2, 3, 4))
NODES = [NodeHardware(host.name, 1, (Card("NVIDIA A10", 24e9),), 60e9) for host in HOSTS]


@pytest.fixture
def folder(tmp_path):
    """A run's, whose steps took 12 seconds where its plan said 10."""
    run = tmp_path / "runs" / RUN.run_id
    (run / "logs").mkdir(parents=True)
    launch = Launch(run.name, str(run), HOSTS, "training.node.finetune", (), "python", {})
    (run / "launch.json").write_text(launch_text(launch))
    (run / "plan.json").write_text(json.dumps({"predicted": PREDICTED}))
    (run / "recipe.toml").write_text('strategy = "zero0"\ndtype = "bfloat16"\ntuning = "lora"\n')
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(*[12.0] * 20)))
    return run


def test_a_run_folder_tells_what_came_of_its_run(folder):
    found = measured(folder, 100.0)
    assert found == replace(RUN, steps=20 - WARM_UP)
    (folder / EVENTS).write_text(row_of(Told(0, Resumed(16, 4)), 1.0))
    assert measured(folder, 100.0) is None, "only four steps since it went on"


@pytest.mark.parametrize("change", [{"profile": "3"}, {"debug_rank": 0}, {"hosts": HOSTS[:2]}])
def test_a_run_that_was_slowed_on_purpose_or_ran_elsewhere_tells_nothing(folder, change):
    launch = Launch(folder.name, str(folder), HOSTS, "training.node.finetune", (), "python", {})
    (folder / "launch.json").write_text(launch_text(replace(launch, **change)))
    assert measured(folder, 100.0) is None
    assert not off(pace_watch(folder))


def test_a_run_says_how_it_computed_and_one_of_rows_that_are_not_packed_nothing(folder):
    (folder / "recipe.toml").write_text('strategy = "zero0"\ndtype = "float32"\ntuning = "full"\nbatching = "packed"\n')
    assert (measured(folder, 100.0).dtype, measured(folder, 100.0).tuning) == ("float32", "full")
    (folder / "recipe.toml").write_text(
        'strategy = "zero0"\ndtype = "bfloat16"\ntuning = "lora"\nbatching = "padded"\n'
    )
    assert measured(folder, 100.0) is None and not off(pace_watch(folder))


def test_a_folder_without_a_plan_tells_nothing(folder):
    assert off(pace_watch(folder))
    (folder / "plan.json").unlink()
    assert measured(folder, 100.0) is None
    assert not off(pace_watch(folder))


def test_rank_0_tells_its_supervisor_while_the_run_goes(folder, monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setenv(PIPE, str(writing))
    recorder = Recorder(folder, load_recipe("tiny", {"logging.tensorboard": "false"}), None)
    for step in range(1, 15):
        recorder.step(StepMetrics(step, 99, 1.0, 1e-4, 0.5, 10, 5.0, 4, 0.1, 0.2, 14.5, "2026-01-01T00:00:00Z"))
    recorder.close()
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        told = [parse_line(MARK + line.strip()) for line in pipe]
    assert told == [OffPlan(WARM_UP + LEAST, 10.0, 14.5)]


def test_a_run_on_the_head_whose_figures_are_cut_is_left_out(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path / "runs")  # nothing was fetched to here
    (folder / MEASURED).write_text(measured_text(RUN))
    other = tmp_path / "runs" / "cut-20260101-000000"
    other.mkdir()
    (other / MEASURED).write_text("{cut")
    head = HereHead(tmp_path / "runs")
    assert preparing.heads_measurements(head).runs == (RUN,)
    assert "a run's measured.json is left out" in capsys.readouterr().err
    launch = replace(Launch(folder.name, str(folder), HOSTS, "m", (), "python", {}))
    assert preparing.measured_speeds(cluster_of(head), launch, NODES).runs == (RUN,)


def test_the_heads_own_calibration_and_check_count_before_anybody_fetched_them(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "runs")
    head = HereHead(tmp_path / "runs")
    launch = Launch(folder.name, str(folder), HOSTS, "m", (), "python", {})
    assert preparing.measured_speeds(cluster_of(head), launch, NODES).link_from == ""
    check = {"run_id": "check-20260101-000000", "time": 50.0, "backend": "nccl", "world_size": 4, "cluster": "mine"}
    check |= {"nodes": [], "checks": [], "pairs": [], "sweep": [SWEEP]}
    (head.runs / check["run_id"]).mkdir()
    (head.runs / check["run_id"] / "result.json").write_text(json.dumps(check))
    known = preparing.measured_speeds(cluster_of(head), launch, NODES)
    assert (known.bytes_per_s, known.link_from) == (1.25e9, check["run_id"])
    newer = replace(MADE, world_size=4)
    Path(calibration_file(head.runs)).write_text(calibration_text(newer))
    known = preparing.measured_speeds(cluster_of(head), launch, NODES)
    assert (known.link_from, known.calibration) == (newer.run_id, newer)


def test_no_more_than_the_newest_forty_runs_are_asked_for(tmp_path):
    for n in range(45):
        run = tmp_path / f"tiny-20260101-{n:06d}"
        run.mkdir()
        (run / MEASURED).write_text(measured_text(replace(RUN, run_id=run.name)))
        os.utime(run / MEASURED, (n, n))
    found = {each.run_id for each in preparing.heads_measurements(HereHead(tmp_path)).runs}
    assert found == {f"tiny-20260101-{n:06d}" for n in range(5, 45)}


def test_fetched_runs_count_and_a_head_that_does_not_answer_is_done_without(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / MEASURED).write_text(measured_text(RUN))

    class Silent:
        name, runs = "te1", Path("/data/runs")

        def __init__(self, node):
            pass

        def ask(self, verb, *arguments):
            raise HeadError("no answer within 4 s")

        def close(self):
            pass

    monkeypatch.setattr(preparing, "RemoteHead", Silent)
    node = type("Node", (), {"name": "te1"})()
    found = preparing.measurements_of("mine", node)
    assert found.runs == (RUN,)
    assert found.notes == ("what te1 has measured is not known: no answer within 4 s",)
    assert preparing.measurements_of("mine", None).runs == (RUN,)


def test_who_follows_reads_it_from_the_status_in_values():
    status = Status("r-20260101-000000", "running", planned_step_s=10.0, measured_step_s=14.5)
    assert parse_status(status_text(status)) == status
    assert off_plan(status) == "a step takes 14.50 s, 1.4 times the 10.00 s of its plan; later plans go by it"
    assert off_plan(replace(status, measured_step_s=5.0)).startswith("a step takes 5.00 s, 50% of the 10.00 s")
    assert news(RunLook(status, True, ())) == [off_plan(status)]
    assert news(RunLook(replace(status, state="finished"), True, ())) == []
    assert off_plan(Status("r-20260101-000000", "running")) == ""
    with pytest.raises(ValueError, match="planned_step_s is 'fast'"):
        parse_status(status_text(status).replace("10.0", '"fast"'))


def test_the_event_is_kept_as_every_other():
    event = OffPlan(8, 10.0, 14.5)
    assert parse_rows(row_of(Told(0, event), 1.0)) == [Told(0, event)]
