"""Runs on a head: make, start, resume, find, stop. Everything the tasks do, without their words."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from training.control.comm_report import Result, parse_result
from training.control.fetch import wanted_step
from training.control.follow import Look, follow, list_command, look_command, parse_list, parse_look
from training.control.head_node import Head, HeadError
from training.control.place import Place, Target, here_target
from training.control.ship import code_files, launch_files, pack
from training.control.starting import Turn, claim, drop, in_the_way, keep, remove_abandoned, turn, under_way
from training.events import EVENTS, Told, parse_rows
from training.launch import (
    ENV_FOLDER,
    Host,
    Launch,
    LaunchError,
    parse_launch,
)
from training.lineage import RECORD, DiskRecord, parse_record
from training.run_folder import LAUNCH, LAUNCHER_LOG, MODEL_RECORD, MODEL_SUMS, PROVE, is_run_id, recipe_of, unit_of
from training.sums import ADAPTER, BEST, MODEL_CONFIG, OPTIMIZER, STATE, SUMS
from training.supervision import reclaim

CHECK = "check"
GENERATE = "generate"
"""What run ids begin with that are no trainings, beside those of PROVE."""
MODULE = re.compile(r"training(\.[a-z_]+)+")
"""What ranks run: always code of ours."""


@dataclass(frozen=True)
class BaseModel:
    """A fetched base model as its folder says it: the stamp written last, and the sha256 of every file."""

    record: Mapping[str, Any]
    sums: str = ""

    @property
    def files(self) -> dict[str, str]:
        """What of it is kept with a run."""
        papers = {MODEL_RECORD: json.dumps(self.record, indent=1) + "\n", MODEL_SUMS: self.sums}
        return {name: text for name, text in papers.items() if text}


def put_new(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Ship code, data and papers into a new run folder."""
    _ship(head, launch, {**code_files(), **launch_files(launch), **files})


def put_plan(head: Head, launch: Launch, plan: str) -> None:
    """The last papers of a run that is ready to start: its plan, and its launch as that wants it."""
    _ship(head, launch, {"plan.json": plan, **launch_files(launch)})


def put(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Some more files into a run's folder."""
    _ship(head, launch, files)


@contextmanager
def alone(place: Place) -> Iterator[Turn]:
    """Inside, nobody else starts anything on the head, no run is going on there, and what is started can stay: no node
    is about to be taken back, and the head's disk is this cluster's own. Raises LaunchError."""
    with turn(place.head) as mine:
        _refuse_active(place.head)
        refuse_reclaimed(place.head, place.hosts)
        refuse_other_disk(place)
        remove_abandoned(place.head)
        yield mine


@contextmanager
def claimed(head: Head, name: str, now: datetime) -> Iterator[str]:
    """The id of a new run, whose folder is made; nothing of it is left where it was not started inside."""
    mine = claim(head, name, now)
    try:
        yield mine.run_id
    finally:
        with suppress(HeadError):  # the reason is being raised already
            drop(head, mine)


def start(head: Head, mine: Turn, launch: Launch) -> None:
    """Start what is ready, while it is this side's turn."""
    mine.confirm()
    keep(head, launch.run_id)
    head.start(launch)


def predicted(head: Head, run_id: str) -> dict[str, Any]:
    """What the plan of a run foresaw; nothing where it has no plan."""
    found: dict[str, Any] = plan_of(head, run_id).get("predicted") or {}
    return found


def plan_of(head: Head, run_id: str) -> dict[str, Any]:
    """A run's plan.json; empty where there is none. Raises LaunchError where it is cut."""
    text = head.shell(f"cat {_quoted(head, run_id)}/plan.json 2>/dev/null; true")
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise LaunchError(f"{run_id}: its plan.json on {head.name} cannot be read ({error}); start anew") from error
    return found if isinstance(found, dict) else {}


def nccl_log(head: Head, run_id: str) -> str:
    """What NCCL said in the log of all ranks."""
    return head.shell(f"grep -a NCCL {_quoted(head, run_id)}/{LAUNCHER_LOG} 2>/dev/null; true")


def events(head: Head, run_id: str) -> list[Told]:
    """What the ranks of a run have told in values, over all its starts, the oldest first."""
    return parse_rows(head.shell(f"cat {_quoted(head, run_id)}/{EVENTS} 2>/dev/null; true"))


def put_again(head: Head, old: Launch, target: Target, files: Mapping[str, Path | str], force: bool) -> Launch:
    """Make a run ready to go on from its newest checkpoint, on the nodes there are now, with today's code and
    `files`."""
    launch = target.launch(Path(old.run_dir), old.module, ("--resume", *(["--force"] if force else [])))
    launch = replace(launch, stop_grace_s=old.stop_grace_s, hang_s=old.hang_s, spent_before=_spent(head, old, launch))
    _ship(head, launch, {**code_files(), **launch_files(launch), **files})
    return launch


def _spent(head: Head, old: Launch, new: Launch) -> float:
    """What the starts of a run until now have cost, in the currency it goes on in."""
    if old.currency != new.currency:
        return 0.0
    so_far = look(head, old.run_id).cost
    return old.spent_before if so_far is None else so_far


def _ship(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / f"spotune-{launch.run_id}.tar.gz"
        pack(files, archive)
        head.put(archive, Path(launch.run_dir))


def look(head: Head, run_id: str) -> Look:
    """One look at a run."""
    return parse_look(head.shell(look_command(str(head.runs / run_id), head.here)))


def all_runs(head: Head) -> list[Look]:
    """A look at every run there, oldest first."""
    return parse_list(head.shell(list_command(str(head.runs), head.here)))


def find(head: Head, run_id: str | None, recipe: str | None = None) -> str:
    """The run asked for, else the newest one (of a recipe). Raises LaunchError where there is none."""
    known = [seen.run_id for seen in all_runs(head)]
    if run_id is not None:
        if not is_run_id(run_id) or run_id not in known:
            raise LaunchError(f"no run {run_id!r} on {head.name}; known: {', '.join(known[-5:]) or 'none'}")
        return run_id
    wanted = [known_id for known_id in known if recipe_of(known_id) == recipe or (not recipe and _trains(known_id))]
    if not wanted:
        raise LaunchError(f"no run{f' of {recipe}' if recipe else ''} on {head.name} yet")
    return wanted[-1]


def _trains(run_id: str) -> bool:
    return recipe_of(run_id) not in {CHECK, GENERATE, PROVE}


def active(head: Head) -> str:
    """The run that is going on there; empty where none is."""
    return next((seen.run_id for seen in all_runs(head) if seen.active), "")


def going_on(head: Head) -> str:
    """The run that is going on there, or on its way to; empty where none is."""
    return under_way(head) or active(head)  # in this order: meanwhile the one becomes the other


def refuse_second(head: Head) -> None:
    """LaunchError where a run is going on or about to: two would share GPUs and ports."""
    if run_id := under_way(head):
        raise LaunchError(in_the_way(head, run_id))
    _refuse_active(head)


def _refuse_active(head: Head) -> None:
    if run_id := active(head):
        raise LaunchError(f"{run_id} is running on {head.name}; wait for it, or end it with: fab stop --run {run_id}")


def refuse_reclaimed(head: Head, hosts: Sequence[Host]) -> None:
    """LaunchError where the cloud has said that it takes one of these nodes back: a run would be ended at once."""
    if head.here:
        return
    answer = head.shell(f"date +%s; for f in {reclaim.FOLDER}/*.json; do cat $f && echo; done 2>/dev/null; true")
    now, *lines = answer.splitlines()
    notices = reclaim.parse_notices(lines)
    if soon := reclaim.pending(notices, [host.name for host in hosts], float(now)):
        raise LaunchError(
            f"{reclaim.words(soon)}: nothing is started; when it is gone: {reclaim.GO_ON}, then the same again"
        )


def disk_record(head: Head) -> DiskRecord | None:
    """Whose data disk the head has; None where it does not say."""
    return parse_record(head.shell(f"cat {shlex.quote(str(head.runs.parent / RECORD))} 2>/dev/null; true"))


def refuse_other_disk(place: Place) -> None:
    """LaunchError where the head's /data is another cluster's, or not on the disk it was on at the last base deploy."""
    if place.head.here or (record := disk_record(place.head)) is None:
        return
    deploy = "run the base deploy: pyinfra INVENTORY deploy/base.py"
    if record.cluster != place.cluster:
        raise LaunchError(
            f"/data on {place.head.name} is of the cluster {record.cluster!r}, not {place.cluster!r}; {deploy}"
        )
    if place.disk and record.disks[-1] != place.disk:
        raise LaunchError(
            f"{place.head.name} has the data disk {place.disk}, but its /data is set up as {record.disks[-1]}; {deploy}"
        )


def wait_for_reports(head: Head, run_id: str) -> None:
    """Of a run that is over: while they are made, its supervisor stands where the next one is to go."""
    follow(lambda: look(head, run_id), lambda seen: None, HeadError, every_s=0.3)


def base_model(head: Head, models: str, model_dir: str) -> BaseModel:
    """What the base deploy recorded for a model on the head. LaunchError where the node is not ready."""
    folder = shlex.quote(f"{models}/{model_dir}")
    read = f"cat {folder}/spotune-model.json 2>/dev/null; echo; echo {SUMS}; cat {folder}/{SUMS} 2>/dev/null; true"
    env, _, content = head.shell(f"test -x {ENV_FOLDER}/bin/python && echo env; {read}").partition("\n")
    record, _, sums = content.partition(f"\n{SUMS}\n")
    deploy = "run the base deploy: pyinfra INVENTORY deploy/base.py"
    if env != "env":
        raise LaunchError(f"{head.name} has no Python environment at {ENV_FOLDER}; {deploy}")
    if not record.strip():
        raise LaunchError(
            f"{head.name} has no model {model_dir} at {models}; "
            f"add its recipe to [models] names in cluster.toml, then {deploy}"
        )
    return BaseModel(json.loads(record), sums)


def _quoted(head: Head, run_id: str) -> str:
    return shlex.quote(str(head.runs / run_id))


def read_launch(head: Head, run_id: str) -> Launch:
    """How a run was started last. LaunchError where its launch.json is none, or another run's."""
    try:
        launch = parse_launch(head.shell(f"cat {_quoted(head, run_id)}/{LAUNCH}"))
    except ValueError as error:
        raise LaunchError(f"{run_id}: its {LAUNCH} cannot be read ({error})") from error
    return believed(launch, head, run_id)


def believed(launch: Launch, head: Head, run_id: str) -> Launch:
    """A launch without what a fetched file could have made of it: where it runs is known, and on this machine
    which programs it runs too."""
    folder = head.runs / run_id
    if (launch.run_id, launch.run_dir) != (run_id, str(folder)) or not MODULE.fullmatch(launch.module):
        raise LaunchError(
            f"{run_id} was not made at {folder}: its {LAUNCH} is of {launch.run_id!r} at {launch.run_dir!r}"
            + ("; a run that was fetched is no run of this machine: leave --here out" if head.here else "")
        )
    if not head.here:
        return launch
    mine = here_target(folder, os.environ["PATH"], Path.home())
    return replace(launch, python=mine.python, env=mine.env, models=mine.models, here=True, data_disk="")


def recipe_text(head: Head, run_id: str) -> str:
    """The recipe a run goes by, as TOML."""
    return head.shell(f"cat {_quoted(head, run_id)}/recipe.toml")


def checkpoint_step(head: Head, run_id: str) -> int | None:
    """The step of a run's best checkpoint, else of its newest: what a fetch would bring."""
    folder = f"{_quoted(head, run_id)}/checkpoints"
    names, _, best = head.shell(f"cd {folder} 2>/dev/null || exit 0; ls; echo; cat {BEST} 2>/dev/null; true").partition(
        "\n\n"
    )
    return wanted_step(names.split(), best)


def whole_checkpoint(head: Head, run_id: str) -> tuple[int | None, list[int]]:
    """The step of the newest checkpoint whose checksums hold, and the steps of the damaged ones after it."""

    def listed(*names: str) -> str:
        return " && ".join(f"grep -q '  {name}$' {SUMS}" for name in names)

    answer = head.shell(
        f"cd {_quoted(head, run_id)}/checkpoints 2>/dev/null || exit 0; "
        "for n in $(ls | sed -n 's/^step-\\([0-9][0-9]*\\)$/\\1/p' | sort -rn); do "
        f"(cd step-$n && sha256sum --check --strict --status {SUMS} && {listed(OPTIMIZER, STATE)} && "
        f"{{ {{ {listed(*ADAPTER)}; }} || {listed(MODEL_CONFIG)}; }} && "
        f"test $(find . -type f ! -path ./{SUMS} | wc -l) = $(wc -l < {SUMS})) 2>/dev/null && echo whole $n && break; "
        "echo damaged $n; done",
        600,
    )
    words = [line.split() for line in answer.splitlines()]
    whole = [int(step) for state, step in words if state == "whole"]
    return (whole[0] if whole else None), [int(step) for state, step in words if state == "damaged"]


def rank_log_command(launch: Launch, rank: int) -> str:
    """A shell command that prints the end of a rank's own log, for the node it ran on."""
    if not 0 <= rank < launch.world_size:
        raise LaunchError(f"{launch.run_id} has ranks 0 to {launch.world_size - 1}, no {rank}")
    return f"tail -n 200 {shlex.quote(launch.run_dir)}/logs/rank-{rank}.log"


def ask_to_stop(head: Head, run_id: str) -> None:
    """Ask a run's supervisor to let the ranks save and leave."""
    if head.here:
        seen = look(head, run_id)
        if seen.alive and seen.status:
            head.shell(f"kill -TERM {seen.status.supervisor_pid}")
    else:
        head.shell(f"systemctl stop --no-block {unit_of(run_id)}")


def left_on(answers: Mapping[str, str | Exception]) -> list[str]:
    """One phrase for each node that is not clean of a run, from the nodes' answers to `sweep_command`."""
    phrases = []
    for name, answer in answers.items():
        if isinstance(answer, Exception):
            phrases.append(f"{name} could not be asked ({answer})")
        elif left := json.loads(answer)["left"]:
            phrases.append(f"{name} still has {len(left)} processes of it")
    return phrases


def start_check(place: Place, now: datetime) -> str:
    """Start a communication check; gives its run id."""
    return start_ranks(place, CHECK, now, "training.commcheck").run_id


def start_ranks(
    place: Place,
    kind: str,
    now: datetime,
    module: str,
    *,
    files: Mapping[str, Path | str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Start ranks that are no training as trainings are started. `kind`: what their run id begins with."""
    head = place.head
    with alone(place) as mine, claimed(head, kind, now) as run_id:
        launch = place.target(run_id).launch(head.runs / run_id, module)
        launch = replace(launch, env={**launch.env, **(env or {})})
        plan = {"run_id": run_id, "cluster": place.cluster, "hosts": [host.name for host in launch.hosts]}
        put_new(head, launch, {"plan.json": json.dumps(plan, indent=1) + "\n", **(files or {})})
        start(head, mine, launch)
    return launch


def check_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Every communication check fetched so far, and one phrase for each that cannot be read."""
    results, unreadable = [], []
    for path in sorted(folder.glob(f"{CHECK}-*/result.json")):
        try:
            results.append(parse_result(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            unreadable.append(f"{path} cannot be read and is left out ({error})")
    return results, unreadable
