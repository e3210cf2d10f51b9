"""On the head, before a run starts: its data tokenised and packed, the facts that its plan is made from."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.control import comm_report, runs
from training.control.head_node import Head, HeadError, within
from training.control.place import Place
from training.control.talk import TalkBroken
from training.cost.pace import LINE_SHARE
from training.data import DataError
from training.data.hub import POINTER
from training.exit_codes import FINISHED, UNUSABLE
from training.launch import RUN_VARIABLE, Launch
from training.plan import calibration
from training.plan.calibration import Calibration
from training.plan.facts import Facts, Known, Papers, read_facts
from training.recipe import Recipe
from training.run_folder import LOCAL_RUNS

PREPARE_S = 3 * 3600.0
"""Tokenising takes about a minute for 100 MB; what is larger was not meant for an evening."""
ONE_MACHINE = 20e9
"""Bytes a second between two GPUs of one machine, over PCIe 4."""


@dataclass(frozen=True)
class Order:
    """What to prepare differently from usual."""

    skip_bad: bool = False
    from_hub: bool = False
    """The data are downloaded on the head."""


def prepare(head: Head, launch: Launch, order: Order) -> dict[str, Any]:
    """Make the prepared data in the run folder; gives the report. DataError for data that cannot be used.

    On a leash: whoever stops waiting, by Ctrl-C or by going away, ends it.
    """
    with head.talk(prepare_command(launch, order)) as talk:
        try:
            answer = within(PREPARE_S, talk.last_words).strip()
        except (TalkBroken, TimeoutError) as error:
            raise HeadError(f"{head.name}: preparing the data: {error}") from error
    said, _, code = answer.rpartition("\n")
    lines = said.strip().splitlines()
    if int(code) == FINISHED:
        prepared: dict[str, Any] = json.loads(lines[-1])
        return prepared
    if int(code) == UNUSABLE:
        raise DataError("\n".join(lines))
    raise HeadError(f"{head.name}: preparing the data ended with {code}: {lines[-1] if lines else 'no message'}")


def order_of(head: Head, run_dir: str) -> Order:
    """What a run's data were prepared with."""
    data = f"{shlex.quote(run_dir)}/data"
    pointer, _, report = head.shell(f"ls {data}/train{POINTER} 2>/dev/null; echo; cat {data}/report.json").partition(
        "\n"
    )
    return Order(skip_bad=json.loads(report)["report"]["bad"] > 0, from_hub=bool(pointer))


def prepare_command(launch: Launch, order: Order) -> str:
    """A shell command that prints the report, or what is wrong, and then the exit code on a line of its own."""
    run = shlex.quote(launch.run_dir)
    # without the run's mark, which is for what a stop of the run should end
    env = {key: value for key, value in launch.env.items() if key != RUN_VARIABLE}
    if order.from_hub:
        env.pop("HF_HUB_OFFLINE", None)
        env |= {key: os.environ[key] for key in ("HF_ENDPOINT",) if key in os.environ}
    settings = [f"{key}={value}" for key, value in env.items()]
    argv = ["env", *settings, launch.python, "-m", "training.prepare", "--run", launch.run_dir, "--attached"]
    argv += ["--skip-bad"] if order.skip_bad else []
    words = f"{run}/logs/prepare.log"
    told = f'c=$?; [ "$c" = {FINISHED} ] || cat {words}; printf "\\n%s\\n" "$c"'
    return f"cd {run} && {{ {shlex.join(argv)} 2>{words}; {told}; }}"


def find_facts(place: Place, launch: Launch, recipe: Recipe, prepared: Mapping[str, Any]) -> Facts:
    """What the plan is made from."""
    folder = Path(launch.models) / recipe.model_dir
    generation = place.head.shell(
        f"cat {shlex.quote(str(folder / 'generation_config.json'))} 2>/dev/null || echo '{{}}'"
    )
    if launch.env.get("DS_ACCELERATOR") == "cpu":  # the ranks compute on the CPU, whatever cards there are
        prepared = {**prepared, "machine": {**prepared["machine"], "gpus": []}}
    papers = Papers(recipe.base_model, prepared["model"], json.loads(generation))
    return read_facts(prepared, papers, tuple(host.slots for host in launch.hosts), known_of(place, launch))


def known_of(place: Place, launch: Launch) -> Known:
    """How fast two ranks talk as these nodes were measured last, else as the network promises; and what else was
    measured of them."""
    made = calibration_of(place)
    results, _ = runs.check_results(LOCAL_RUNS)
    mine = [r for r in results if r.get("cluster") == place.cluster and r["world_size"] == launch.world_size]
    known = [(float(r["time"]), comm_report.best_busbw(r, "all_gather") * 1e9, r["run_id"]) for r in mine]
    if made and (proved := made.link(place.cluster, launch.world_size)):
        known.append((made.time, proved, made.run_id))
    if known and (newest := max(known))[1]:
        return Known(newest[1], newest[2], made)
    if len(launch.hosts) == 1:
        return Known(ONE_MACHINE, "what PCIe 4 does", made)
    if place.line_rate_gbps is None:
        return Known(None, "", made)
    return Known(LINE_SHARE * place.line_rate_gbps / 8 * 1e9, "its promised line rate", made)


def calibration_of(place: Place) -> Calibration | None:
    """What `fab prove` measured last on this head; one that cannot be read is said, and not gone by."""
    path = calibration.calibration_file(place.head.runs)
    content = place.head.shell(f"cat {shlex.quote(path)} 2>/dev/null; true")
    try:
        return calibration.parse(content) if content.strip() else None
    except ValueError as error:
        print(f"{place.head.name}: {path} is left out: {error}", file=sys.stderr)
        return None
