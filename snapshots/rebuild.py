"""A rebuild: planned against what there is, then its steps, one after the other. Each can be repeated: what is there is
left as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inventory.cloud.errors import RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import Disk
from inventory.phases import PARTS, Phases
from inventory.renting.machines import apply_plan, naming_gone
from inventory.renting.members import Existing, existing
from inventory.renting.plan import RentalWish, missing_machines, plan_up
from inventory.renting.recovery import rented_nodes
from inventory.settings import DEFAULT_PATH, PATH_VARIABLE, Settings
from snapshots.listing import LATEST, YES, SnapshotError, chosen, progress, wait_until_usable
from snapshots.node_disks import CHECKOUT, Groups, ReadAhead, begin, groups_for, look, wait_for_data
from snapshots.steps import (
    DEPLOYED_TAG,
    WARMED_TAG,
    Rebuild,
    Step,
    cold_disks,
    diff,
    left_in_other_zones,
    refuse_another,
    wished,
)

OPERATION_TIMES = "SPOTUNE_OPERATION_TIMES"
"""Names a file for the deploy; deploy/node_operation.py reads it."""
MOST_MACHINES = 100
BASE_DEPLOY = "base deploy"
BEFORE_OPERATIONS = "start and questions"


def machines_asked(text: str) -> int:
    """What `--nodes` says; 0 without it: as cluster.toml says. Raises RentError."""
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_MACHINES):
        raise RentError(f"--nodes {text}: a cluster has 1 to {MOST_MACHINES} machines")
    return int(text)


def planned(
    cloud: Cloud,
    settings: Settings,
    selector: str,
    nodes: int = 0,
    hours: float = 0,
    *,
    others: bool = False,
) -> Rebuild:
    """The steps of a rebuild from the snapshot of this `selector`; nodes, hours 0: as cluster.toml says; `others`:
    another owner's machines and disks are taken for ours. Raises RentError, CloudError."""
    if hours and hours < 0.5:
        raise RentError(f"--hours {hours:g}: the cloud takes half an hour at least")
    rental = settings.rental
    snapshot = chosen(cloud, settings, selector)
    wish = RentalWish(nodes or rental.nodes, hours or rental.hours, snapshot, others=others)
    machines = missing_machines(wish, existing(cloud, settings), cloud.now())
    if selector != LATEST:
        refuse_another(settings.name, machines)
    plan = diff(machines, rental.data_disk_gib)
    return diff(plan_up(cloud, settings, wish), rental.data_disk_gib) if plan.needs_machines else plan


def next_step(trainings: Sequence[tuple[str, str]] | None) -> str:
    """What to type after a rebuild, by the trainings on the head that have a checkpoint, and their states; None:
    nobody knows them."""
    new = "fab train --model NAME --data FILE"
    if trainings is None:
        return f"next: fab train --resume, or {new}"
    if not trainings:
        return f"next: {new}; no training on the head has a checkpoint"
    run_id, state = trainings[-1]
    if state == "finished":
        return f"next: {new}; {run_id}, the newest run, is finished: fab generate --run {run_id} asks what it learned"
    return f"next: fab train --resume {run_id}, or {new}"


def _unread(resources: Existing) -> list[Disk]:
    """The disks that machines have and nobody has read yet."""
    return [disk for disk in cold_disks(resources) if disk.instance_id]


@dataclass
class Rebuilding:
    """A rebuild under way. What belongs to other folders comes as values and functions."""

    cloud: Cloud
    settings: Settings
    plan: Rebuild
    model: str
    """Folder of the model to read first; empty: the newest run's."""
    models: Sequence[str]
    """Folders of the settings' models, read where there is no run."""
    doctor: Callable[[], None]
    say: Callable[[str], None]
    phases: Phases = field(default_factory=Phases)
    ctrl_c_ends: bool = False
    """Rather than to skip what is still to be read."""
    reading: ReadAhead | None = None
    """What is read while the base deploy goes on."""

    def do_all(self) -> None:
        """The steps, then what a user would not expect. Raises as `do`."""
        before = existing(self.cloud, self.settings)
        for step in self.plan.steps:
            self.do(step)
        after = existing(self.cloud, self.settings)
        for line in left_in_other_zones(self.plan.machines.wish, before, after):
            self.say(line)

    def do(self, step: Step) -> None:
        """One step. Raises RentError, CloudError, SshError, SnapshotError."""
        self.say(f"-- {step.what}")
        if step.kind == "wait":
            with self.phases.phase("wait for the snapshot"):
                wait_until_usable(self.cloud, wished(self.plan.machines.wish))
        elif step.kind == "machines":
            apply_plan(self.cloud, self.settings, self.plan.machines, self.say, self.phases)
        elif step.kind in ("deploy", "warm"):
            resources = existing(self.cloud, self.settings)
            with naming_gone(self.cloud, resources.instances):
                self._deploy(resources) if step.kind == "deploy" else self._warm(resources)
        else:
            with self.phases.phase("doctor"):
                self.doctor()

    def _deploy(self, resources: Existing) -> None:
        self._begin_reading(resources)
        if code := base_deploy(self.settings, self.phases):
            raise SnapshotError(f"the base deploy ended with {code}; fix what it named, then continue: fab rebuild")
        self.cloud.tag("instance", [each.instance_id for each in resources.instances], {DEPLOYED_TAG: YES})

    def _warm(self, resources: Existing) -> None:
        failed = self._watch() if self.reading else {"": "not begun"}
        if failed:  # or the deploy was in its way
            self._begin_reading(resources)
            failed = self._watch() if self.reading else {}
        if failed is None:
            if self.ctrl_c_ends:
                raise KeyboardInterrupt
            self.say("skipped: the first start will be slower; fab rebuild reads what is left")
        elif failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise SnapshotError(f"not read ahead: {reasons}; again with: fab rebuild")
        elif cold := _unread(resources):
            self.cloud.tag("disk", [disk.disk_id for disk in cold], {WARMED_TAG: YES})

    def _begin_reading(self, resources: Existing) -> None:
        """Read what training needs, on the nodes whose disks nobody has read yet, while something else goes on."""
        serials = {disk.serial for disk in _unread(resources)}
        if not serials:
            return
        nodes = rented_nodes(self.cloud, self.settings)
        cold_nodes = [node for node in nodes if node.disk_serial in serials]

        def groups() -> dict[str, Groups]:
            wait_for_data([nodes[0], *cold_nodes])
            run = look(nodes[0], self.settings.deploy_command)["run"]
            models = self._models_to_warm(run)
            return {node.name: groups_for(node.rank, models, run) for node in cold_nodes}

        self.reading = begin(cold_nodes, groups)

    def _watch(self) -> Mapping[str, str] | None:
        """Wait for what is being read: by node why it failed; None where Ctrl-C skipped the rest."""
        assert self.reading is not None
        reading, self.reading = self.reading, None
        with progress() as at:
            failed = reading.watch(at)
        self.phases.add("read ahead", reading.began, reading.ended or time.time())
        return failed

    def _models_to_warm(self, run: dict[str, Any] | None) -> list[str]:
        if self.model:
            return [self.model]
        return [run["model_dir"]] if run and run["model_dir"] else list(self.models)


def base_deploy(settings: Settings, phases: Phases) -> int:
    """The base deploy as a process of its own, its output where ours goes; its exit code."""
    program, *arguments = settings.deploy_command.split()
    argv = [str(Path(sys.executable).with_name(program)), *arguments]
    cluster = Path(os.environ.get(PATH_VARIABLE, DEFAULT_PATH)).resolve()
    with tempfile.TemporaryDirectory(prefix="spotune-") as folder:
        times = Path(folder) / "operations.jsonl"
        env = {**os.environ, PATH_VARIABLE: str(cluster), OPERATION_TIMES: str(times)}
        began = time.time()
        with phases.phase(BASE_DEPLOY):
            code = subprocess.run(argv, cwd=CHECKOUT, env=env, check=False).returncode
        lines = times.read_text(encoding="utf-8").splitlines() if times.exists() else []
    for name, start, end in groups_of(lines, began):
        phases.add(f"{BASE_DEPLOY}{PARTS}{name}", start, end)
    return code


def groups_of(lines: Sequence[str], began: float) -> list[tuple[str, float, float]]:
    """(group, from, to) of the deploy's operations as they follow each other, and what came before the first. Pure."""
    groups: list[tuple[str, float, float]] = []
    for line in lines:
        operation = json.loads(line)
        name, start, end = operation["group"], operation["began"], operation["ended"]
        if groups and groups[-1][0] == name:
            start = groups.pop()[1]
        groups.append((name, start, end))
    return [(BEFORE_OPERATIONS, began, groups[0][1]), *groups] if groups else []
