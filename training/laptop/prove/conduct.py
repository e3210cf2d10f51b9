"""The whole of `fab prove`, from the first start to the table's rows and the calibration. The control side."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from training.cost.memory import GIB, with_reserve
from training.cost.shape import PlanError
from training.data.sample import DataError
from training.laptop import follow, new_run, rental, runs, start_lock, start_run
from training.laptop.base_model import here_base_model
from training.laptop.head_node import Head
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session
from training.laptop.prove.drills import Drill, named, silently
from training.models import tiny
from training.models.names import load_recipe
from training.plan import calibration
from training.plan.calibration import Calibration
from training.recipe.base import TINY
from training.recipe.recipe import Recipe
from training.run import comm_report
from training.run.causes import CauseKind
from training.run.folder import PROVE, RESULT
from training.run.launch import Launch, LaunchError
from training.run.outcome import Outcome, as_rows, failed, judged, not_here, read
from training.text.counts import size_text
from training.text.files import bounded_json

WALK = "training.node.prove.walk"
STEPS = 3
LONGEST_S = 900.0
"""Rented machines stay for as long as this; the drills' own plans, of runs that never finish, would ask for days."""
WITHIN = 2.0
"""A measured time passes where the plan's is within this factor of it."""


@dataclass(frozen=True)
class Proof:
    """Everything that came of it."""

    run_id: str
    outcomes: Sequence[Outcome]
    calibration: Calibration | None

    @property
    def failures(self) -> int:
        return sum(outcome.state == "fail" for outcome in self.outcomes)


def prove(
    cluster: Session,
    model: str,
    quick: bool,
    say: Callable[[str], None],
) -> Proof:
    """Try everything; what fails is a row, and what is broken does not keep the rest from being tried."""
    start_lock.refuse_second(cluster.head)
    rental.extend_for_plan(cluster, LONGEST_S)
    cluster = replace(cluster, extends_rental=False)
    if cluster.head.here:  # the drills want it, and it is made once
        here_base_model(load_recipe("tiny"), cluster.launch_of("prove-20260101-000000", ""))
    with _stopped_on_interrupt(cluster.head, say):
        return _proof(cluster, model, quick, say)


@contextmanager
def _stopped_on_interrupt(head: Head, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, Ctrl-C ends what was started: nobody waits for what it would find."""
    before = {seen.run_id for seen in runs.all_runs(head)}
    try:
        yield
    except KeyboardInterrupt:
        for seen in runs.all_runs(head):
            if seen.active and seen.run_id not in before:
                follow.ask_to_stop(head, seen.run_id)
                say(f"{seen.run_id} is asked to stop")
        raise


def _proof(cluster: Session, model: str, quick: bool, say: Callable[[str], None]) -> Proof:
    say("devices, network and strategies on all ranks, in one start")
    files = {"asked.json": json.dumps({"quick": quick}) + "\n"}
    launch = new_run.start_ranks(cluster, PROVE, datetime.now(UTC), WALK, files=files)
    result, outcomes = _results_of(cluster, launch)
    made = calibrate(result, launch.run_id, cluster.name, time.time())
    _keep(cluster, launch, outcomes, made)
    if quick:
        return Proof(launch.run_id, outcomes, made)
    try:
        _append(outcomes, "drill", Drill(cluster, say).all)
        if model:
            _append(outcomes, f"{STEPS} steps of {model}", lambda: real_steps(cluster, model, say))
    finally:  # Ctrl-C among them
        try:
            _keep(cluster, launch, outcomes, made)
        except LaunchError as error:
            outcomes.append(failed("keeping these rows", str(error)))
    return Proof(launch.run_id, outcomes, made)


def _append(outcomes: list[Outcome], name: str, part: Callable[[], Iterable[Outcome]]) -> None:
    """A part's outcomes, one by one, without the plans and notes of the runs that are started on the way; what breaks
    it is one of them."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for outcome in part():
                outcomes.append(outcome)  # one by one: an error leaves what was before it
    except (LaunchError, ValueError) as error:
        outcomes.append(failed(name, str(error)))


def _results_of(cluster: Session, launch: Launch) -> tuple[dict[str, Any], list[Outcome]]:
    """What the walk found, and how it ended: out of memory on the last rank, and said so."""
    head, rank = cluster.head, launch.world_size - 1
    seen = silently(head, launch.run_id)
    content = head.ask(fs.text, f"{launch.run_dir}/{RESULT}")
    result: dict[str, Any] = bounded_json(content or '{"outcomes": [], "done": false}')
    outcomes = read(result["outcomes"])
    reason = seen.reason
    if not result["done"]:
        return result, [*outcomes, failed("the start of all ranks", f"it ended before it had seen all: {reason}")]
    broken = (rank, launch.host_of(rank).name)
    memory: tuple[CauseKind, ...] = ("out_of_memory", "out_of_gpu_memory")
    return result, [*outcomes, named("out of memory on a rank", seen, broken, memory, _ended_after(seen.status))]


def _ended_after(status: Any) -> float:
    return (status.ended or status.updated) - status.started if status else 0.0


def calibrate(result: Mapping[str, Any], run_id: str, cluster: str, at: float) -> Calibration | None:
    """The slowest rank's rates; None where some rank has none, or the cards differ."""
    rates = result.get("rates") or []
    cards = {each.get("card") for each in rates}
    if not rates or len(cards) != 1 or not all({"matmul_flops", "memory_bytes_per_s"} <= each.keys() for each in rates):
        return None

    def slowest(key: str, of: Callable[[Iterable[float]], float] = min) -> float | None:
        known = [each[key] for each in rates if each.get(key)]
        return of(known) if len(known) == len(rates) else None

    comm = result.get("comm") or {"sweep": [], "nodes": []}
    link = comm_report.best_busbw(comm, "all_gather") * 1e9
    return Calibration(
        run_id=run_id,
        cluster=cluster,
        time=at,
        world_size=len(rates),
        card=cards.pop(),
        matmul_flops=min(each["matmul_flops"] for each in rates),
        memory_bytes_per_s=min(each["memory_bytes_per_s"] for each in rates),
        link_bytes_per_s=link or None,
        own_loss_s=slowest("own_loss_s", max),
        liger_loss_s=slowest("liger_loss_s", max),
        ram_bytes=slowest("ram_bytes"),
        nodes=comm_report.node_names(comm),
    )


def real_steps(cluster: Session, model: str, say: Callable[[str], None]) -> list[Outcome]:
    """Three steps of a model, by the way every run takes, against its plan."""
    say(f"{STEPS} steps of {model}")
    settings = {"steps": str(STEPS), "save_every": str(STEPS), "optimizer.warmup_steps": "0"}
    recipe = load_recipe(model, settings).model_copy(update={"name": PROVE})
    try:
        run_id = _start_steps(cluster, recipe)
    except (LaunchError, PlanError, DataError) as error:
        return [failed(f"{STEPS} steps of {model}", str(error))]
    seen = silently(cluster.head, run_id)
    if seen.state != "finished":
        return [failed(f"{STEPS} steps of {model}", seen.reason)]
    return against_plan(model, runs.predicted(cluster.head, run_id), seen.metrics)


def _start_steps(cluster: Session, recipe: Recipe) -> str:
    with tempfile.TemporaryDirectory() as folder:
        data = () if recipe.base_model == TINY else (str(Path(folder) / "questions.jsonl"),)
        for file in data:
            tiny.write_data(Path(file))
        training_data = new_run.training_data(recipe, data, Path(folder))
        return start_run.start(cluster, start_run.StartRequest(recipe, training_data, anyway=True), datetime.now(UTC))


def against_plan(model: str, predicted: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Memory and seconds as they were, against what the plan foresaw. The first step warms up."""
    held = max(row.get("memory_reserved_gib") or row["memory_gib"] for row in metrics)
    foreseen = with_reserve(predicted["memory_gib"] * GIB, gpu=bool(predicted["card"])) / GIB
    memory = judged(
        f"memory of {model}", held <= foreseen, f"{size_text(held * GIB)}, the plan said {size_text(foreseen * GIB)}"
    )
    step_s = min(row["step_s"] for row in metrics[1:] or metrics)
    name, planned = f"seconds a step of {model}", predicted["step_s"]
    if planned is None:
        return [memory, not_here(name, f"{step_s:.2f} s; the plan estimates none for a CPU or an unknown card")]
    words = f"{step_s:.2f} s, the plan said {planned:.2f}"
    return [memory, judged(name, planned / WITHIN <= step_s <= WITHIN * planned, words)]


def _keep(cluster: Session, launch: Launch, outcomes: Sequence[Outcome], made: Calibration | None) -> None:
    """prove.json into the run's folder; the calibration there and where the plan looks for it."""
    proof = {"run_id": launch.run_id, "cluster": cluster.name, "time": time.time(), "outcomes": as_rows(outcomes)}
    files = {"prove.json": json.dumps(proof, ensure_ascii=False, indent=1) + "\n"}
    if made:
        files[calibration.FILE] = calibration.calibration_text(made)
    new_run.upload(cluster.head, launch, files)
    if made:
        cluster.head.ask(fs.write, calibration.calibration_file(cluster.head.runs), files[calibration.FILE])
