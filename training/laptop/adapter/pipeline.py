"""Start the answers of a model over all ranks of a cluster, as trainings are started. The control side; no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from training.bounded import bounded_json
from training.counting import size_text
from training.errors import AdapterError
from training.laptop import attach, make_run, stop_run
from training.laptop.adapter.tuned_model import TunedModel
from training.laptop.open_cluster import OpenCluster
from training.laptop.runs import GENERATE
from training.launch import Launch, LaunchError
from training.questions import Messages, Sampling
from training.run_folder import RESULT

STOP_GRACE_S = 1
"""There is nothing to save."""


def on_all_ranks(
    cluster: OpenCluster, about: TunedModel, questions: Sequence[Messages], sampling: Sampling, now: datetime
) -> list[dict[str, Any]]:
    """The answers of ranks that each hold a share of the layers; none after Ctrl-C, which ends the ranks too."""
    head = cluster.head
    with make_run.alone(cluster) as mine, make_run.claimed(head, GENERATE, now) as run_id:
        launch = _made_ready(cluster, run_id, about, questions, sampling)
        mine.confirm()
        make_run.start(head, launch)
    seen = attach.attach(head, run_id)
    if seen is None:
        stop_run.ask_to_stop(head, run_id)
        return []
    attach.conclude(head, run_id, seen)
    if seen.state != "finished":
        raise LaunchError(f"{run_id} was stopped before it had answered")
    result = bounded_json(head.shell(f"cat {shlex.quote(str(head.runs / run_id))}/{RESULT}"))
    sizes = ", ".join(size_text(nbytes) for nbytes in result["loaded_bytes"])
    print(f"each rank held its share of the layers: {sizes}")
    answers: list[dict[str, Any]] = result["answers"]
    return answers


def _made_ready(
    cluster: OpenCluster, run_id: str, about: TunedModel, questions: Sequence[Messages], sampling: Sampling
) -> Launch:
    """Its folder gets the adapter and the questions, and goes to all nodes."""
    head, run_dir = cluster.head, cluster.head.runs / run_id
    launch = replace(cluster.launch(run_id, "training.node.adapter.pipeline"), stop_grace_s=STOP_GRACE_S)
    if launch.world_size < 2:
        raise AdapterError("one rank is no more than one card: answers over several need more nodes or cards")
    there = shlex.quote(str(run_dir))
    head.shell(f"mkdir -p {there} && cp -rl {shlex.quote(about.learned)} {there}/adapter")
    plan = {"run_id": run_id, "cluster": cluster.name, "of": about.run_id, "step": about.step}
    asked = {"model": about.model, "questions": list(questions), "sampling": asdict(sampling)}
    asked["template_args"] = about.template_args
    files = {"plan.json": json.dumps(plan, indent=1) + "\n", "questions.json": json.dumps(asked) + "\n"}
    make_run.put_new(head, launch, files)
    return launch
