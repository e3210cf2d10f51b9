"""Runs on a head: make, start, resume, find, stop. Everything the tasks do, without their words."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from training.control.comm_report import Result, parse_result
from training.control.fetch import newest_step
from training.control.follow import Look, list_command, look_command, parse_list, parse_look
from training.control.head_node import Head
from training.control.ship import code_files, launch_files, pack
from training.launch import (
    ENV_FOLDER,
    RUN_VARIABLE,
    Host,
    Launch,
    LaunchError,
    here_env,
    parse_launch,
    rank_env,
)
from training.run_folder import DATA_DISK, LAUNCH, is_run_id, new_run_id, recipe_of, unit_of
from training.sums import PARTS, SUMS

HERE_RANKS = 2
CHECK = "check"


@dataclass(frozen=True)
class Target:
    """Where ranks run and with what."""

    hosts: tuple[Host, ...]
    python: str
    env: Mapping[str, str]
    models: str
    here: bool = False
    data_disk: str = ""

    def launch(self, run_dir: Path, module: str, arguments: Sequence[str] = ()) -> Launch:
        """A launch of a module in a run folder."""
        return Launch(
            run_id=run_dir.name,
            run_dir=str(run_dir),
            hosts=self.hosts,
            module=module,
            arguments=tuple(arguments),
            python=self.python,
            env=self.env,
            models=self.models,
            here=self.here,
            data_disk=self.data_disk,
        )


def cluster_target(hosts: Sequence[Host], run_dir: Path, cuda: bool) -> Target:
    """The nodes, with the environment the base deploy put there."""
    env = rank_env(str(run_dir), "cuda" if cuda else "cpu")
    return Target(tuple(hosts), f"{ENV_FOLDER}/bin/python", env, f"{DATA_DISK}/models", data_disk=str(DATA_DISK))


def here_target(run_dir: Path, path: str, home: Path) -> Target:
    """Two ranks on this machine, with this very Python."""
    cuda = Path("/dev/nvidia1").exists()  # NCCL wants a GPU a rank
    env = here_env(str(run_dir), str(Path(sys.executable).parent), path, cuda, str(home))
    host = Host("localhost", "127.0.0.1", HERE_RANKS)
    return Target((host,), sys.executable, env, str(home / ".cache" / "spotune" / "models"), here=True)


@dataclass(frozen=True)
class Place:
    """A head and the nodes its runs use."""

    head: Head
    hosts: tuple[Host, ...] = ()
    cuda: bool = False
    cluster: str = "this machine"
    """Its name, so that measurements of one are not compared with another's."""
    line_rate_gbps: float | None = None
    """What its network promises."""

    def target(self, run_id: str) -> Target:
        """Where the ranks of a run go."""
        run_dir = self.head.runs / run_id
        if self.head.here:
            return here_target(run_dir, os.environ["PATH"], Path.home())
        return cluster_target(self.hosts, run_dir, self.cuda)


def start_new(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Ship code, data and papers into a new run folder and start its supervisor."""
    _ship(head, launch, {**code_files(), **launch_files(launch), **files})
    head.start(launch)


def restart(head: Head, old: Launch, target: Target) -> None:
    """Start a run again from its newest checkpoint, on the nodes there are now, with today's code."""
    launch = target.launch(Path(old.run_dir), old.module, ("--resume",))
    launch = replace(launch, stop_grace_s=old.stop_grace_s)
    _ship(head, launch, {**code_files(), **launch_files(launch)})
    head.start(launch)


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
    known = [seen.status.run_id for seen in all_runs(head) if seen.status]
    if run_id is not None:
        if not is_run_id(run_id) or run_id not in known:
            raise LaunchError(f"no run {run_id!r} on {head.name}; known: {', '.join(known[-5:]) or 'none'}")
        return run_id
    wanted = [known_id for known_id in known if recipe_of(known_id) == recipe or (not recipe and _trains(known_id))]
    if not wanted:
        raise LaunchError(f"no run{f' of {recipe}' if recipe else ''} on {head.name} yet")
    return wanted[-1]


def _trains(run_id: str) -> bool:
    return recipe_of(run_id) != CHECK


def refuse_second(head: Head) -> None:
    """LaunchError where a run is going on: two would share GPUs and ports."""
    for seen in all_runs(head):
        if seen.alive and seen.status and not seen.status.over:
            raise LaunchError(
                f"{seen.status.run_id} is running on {head.name}; "
                f"wait for it, or end it with: fab stop --run {seen.status.run_id}"
            )


def base_model_hash(head: Head, models: str, model_dir: str) -> str:
    """The hash the base deploy recorded for a model on the head. LaunchError where the node is not ready."""
    record = shlex.quote(f"{models}/{model_dir}/spotune-model.json")
    answer = head.shell(f"test -x {ENV_FOLDER}/bin/python && echo env; cat {record} 2>/dev/null; true")
    env, _, content = answer.partition("\n")
    deploy = "run the base deploy: pyinfra INVENTORY deploy/base.py"
    if env != "env":
        raise LaunchError(f"{head.name} has no Python environment at {ENV_FOLDER}; {deploy}")
    if not content.strip():
        raise LaunchError(
            f"{head.name} has no model {model_dir} at {models}; "
            f"add its recipe to [models] names in cluster.toml, then {deploy}"
        )
    return str(json.loads(content)["hash"])


def _quoted(head: Head, run_id: str) -> str:
    return shlex.quote(str(head.runs / run_id))


def read_launch(head: Head, run_id: str) -> Launch:
    """How a run was started last."""
    return parse_launch(head.shell(f"cat {_quoted(head, run_id)}/{LAUNCH}"))


def checkpoint_step(head: Head, run_id: str) -> int | None:
    """The step of a run's newest whole checkpoint."""
    names = head.shell(f"ls {_quoted(head, run_id)}/checkpoints 2>/dev/null; true")
    return newest_step(names.split())


def whole_checkpoint(head: Head, run_id: str) -> tuple[int | None, list[int]]:
    """The step of the newest checkpoint whose checksums hold, and the steps of the damaged ones after it."""
    listed = " && ".join(f"grep -q '  {name}$' {SUMS}" for name in PARTS)
    answer = head.shell(
        f"cd {_quoted(head, run_id)}/checkpoints 2>/dev/null || exit 0; "
        "for n in $(ls | sed -n 's/^step-\\([0-9][0-9]*\\)$/\\1/p' | sort -rn); do "
        f"(cd step-$n && sha256sum --check --status {SUMS} && {listed}) 2>/dev/null && echo whole $n && break; "
        "echo damaged $n; done",
        600,
    )
    words = [line.split() for line in answer.splitlines()]
    whole = [int(step) for state, step in words if state == "whole"]
    return (whole[0] if whole else None), [int(step) for state, step in words if state == "damaged"]


def generate_command(head: Head, run_id: str, step: int, prompts: Sequence[str]) -> str:
    """A shell command that asks the base model and the adapter of a checkpoint, on the head."""
    launch = read_launch(head, run_id)
    plan = json.loads(head.shell(f"cat {_quoted(head, run_id)}/plan.json"))
    adapter = f"{launch.run_dir}/checkpoints/step-{step}/adapter"
    argv = [launch.python, "-m", "training.generate", "--model", f"{launch.models}/{plan['model_dir']}"]
    argv += ["--adapter", adapter, *(word for prompt in prompts for word in ("--prompt", prompt))]
    env = [f"{key}={value}" for key, value in launch.env.items() if key != RUN_VARIABLE]
    return f"cd {shlex.quote(launch.run_dir)} && {shlex.join(['env', *env, *argv])}"


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
    """Start a communication check as trainings are started; gives its run id."""
    refuse_second(place.head)
    run_id = new_run_id(CHECK, now)
    launch = place.target(run_id).launch(place.head.runs / run_id, "training.commcheck")
    plan = {"run_id": run_id, "cluster": place.cluster, "hosts": [host.name for host in launch.hosts]}
    start_new(place.head, launch, {"plan.json": json.dumps(plan, indent=1) + "\n"})
    return run_id


def check_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Every communication check fetched so far, and one phrase for each that cannot be read."""
    results, unreadable = [], []
    for path in sorted(folder.glob(f"{CHECK}-*/result.json")):
        try:
            results.append(parse_result(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            unreadable.append(f"{path} cannot be read and is left out ({error})")
    return results, unreadable
