"""Start the answers of a model over all ranks of a cluster, as trainings are started. The control side; no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from training.adapter import AdapterError
from training.adapter.at_head import Subject
from training.adapter.questions import Messages, Sampling
from training.control import attend, runs
from training.control.place import Place
from training.control.runs import GENERATE
from training.launch import Launch, LaunchError
from training.run_folder import RESULT

STOP_GRACE_S = 1
"""There is nothing to save."""


def start_across(place: Place, about: Subject, questions: Sequence[Messages], sampling: Sampling, now: datetime) -> str:
    """Start the ranks with the questions; gives their run id. Its folder gets the adapter, and goes to all nodes."""
    head = place.head
    with runs.alone(place) as mine, runs.claimed(head, GENERATE, now) as run_id:
        launch = _made_ready(place, run_id, about, questions, sampling)
        runs.start(head, mine, launch)
    return run_id


def _made_ready(place: Place, run_id: str, about: Subject, questions: Sequence[Messages], sampling: Sampling) -> Launch:
    head, run_dir = place.head, place.head.runs / run_id
    launch = replace(place.target(run_id).launch(run_dir, "training.adapter.pipeline"), stop_grace_s=STOP_GRACE_S)
    if launch.world_size < 2:
        raise AdapterError("one rank is no more than one card: answers over several need more nodes or cards")
    there = shlex.quote(str(run_dir))
    head.shell(f"mkdir -p {there} && cp -rl {shlex.quote(about.adapter)} {there}/adapter")
    plan = {"run_id": run_id, "cluster": place.cluster, "of": about.run_id, "step": about.step}
    asked = {"model": about.model, "questions": list(questions), "sampling": asdict(sampling)}
    papers = {"plan.json": json.dumps(plan, indent=1) + "\n", "questions.json": json.dumps(asked) + "\n"}
    runs.put_new(head, launch, papers)
    return launch


def answers_of(place: Place, run_id: str) -> list[dict[str, Any]] | None:
    """Wait for the answers; None after Ctrl-C, which ends the ranks too."""
    head = place.head
    seen = attend.attend(head, run_id)
    if seen is None:
        runs.ask_to_stop(head, run_id)
        return None
    attend.conclude(head, run_id, seen)
    if seen.state != "finished":
        raise LaunchError(f"{run_id} was stopped before it had answered")
    result = json.loads(head.shell(f"cat {shlex.quote(str(head.runs / run_id))}/{RESULT}"))
    sizes = ", ".join(f"{nbytes / 2**30:.2f}" for nbytes in result["loaded_bytes"])
    print(f"each rank held its share of the layers: {sizes} GiB")
    answers: list[dict[str, Any]] = result["answers"]
    return answers
