"""The steps of a rebuild, done one after the other. Each can be repeated: what is there is left as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inventory.phases import Phases
from inventory.renting.machines import naming_gone
from inventory.renting.members import rented_nodes
from snapshots import apply
from snapshots.contents import YES
from snapshots.create import SnapshotError, wait_until_usable
from snapshots.on_node import look, wait_for_data
from snapshots.progress import progress
from snapshots.rebuild import DEPLOYED_TAG, WARMED_TAG, Desired, Existing, Step, cold_disks, left_behind
from snapshots.warm import Groups, Reading, begin, groups_for

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.cloud.values import Disk
    from inventory.renting.up import UpPlan
    from inventory.settings import Settings


def _cold(there: Existing) -> list[Disk]:
    """The disks that machines have and nobody has read yet."""
    return [disk for disk in cold_disks(there) if disk.instance_id]


@dataclass(frozen=True)
class Work:
    """A rebuild under way. What belongs to other folders comes as values and functions."""

    cloud: Cloud
    settings: Settings
    wanted: Desired
    offer: UpPlan | None
    """What the missing machines are; None where none is missing."""
    model: str
    """Folder of the model to read first; empty: the newest run's."""
    models: Sequence[str]
    """Folders of the settings' models, read where there is no run."""
    doctor: Callable[[], None]
    say: Callable[[str], None]
    phases: Phases = field(default_factory=Phases)
    under_way: list[Reading] = field(default_factory=list)
    """What is read while the base deploy goes on."""

    def do_all(self, steps: Sequence[Step]) -> None:
        """The steps, then what a user would not expect. Raises as `do`."""
        before = apply.existing(self.cloud, self.settings)
        for step in steps:
            self.do(step)
        for line in left_behind(self.wanted, before, apply.existing(self.cloud, self.settings)):
            self.say(line)

    def do(self, step: Step) -> None:
        """One step. Raises RentError, CloudError, SshError, SnapshotError."""
        self.say(f"-- {step.what}")
        if step.kind == "wait":
            self._wait()
        elif step.kind == "machines":
            self._machines()
        elif step.kind in ("deploy", "warm"):
            there = apply.existing(self.cloud, self.settings)
            with naming_gone(self.cloud, there.instances):
                self._deploy(there) if step.kind == "deploy" else self._warm(there)
        else:
            with self.phases.phase("doctor"):
                self.doctor()

    def _wait(self) -> None:
        with self.phases.phase("wait for the snapshot"):
            wait_until_usable(self.cloud, self.wanted.snapshot)

    def _machines(self) -> None:
        from inventory.renting.up import carry_out

        assert self.offer is not None
        carry_out(self.cloud, self.settings, self.offer, self.say, phases=self.phases)

    def _deploy(self, there: Existing) -> None:
        self._begin_reading(there)
        if code := apply.base_deploy(self.settings, self.phases):
            raise SnapshotError(f"the base deploy ended with {code}; mend what it named, then go on: fab rebuild")
        self.cloud.tag("instance", [each.instance_id for each in there.instances], {DEPLOYED_TAG: YES})

    def _warm(self, there: Existing) -> None:
        failed = self._watch() if self.under_way else {"": "not begun"}
        if failed:  # or the deploy was in its way
            self._begin_reading(there)
            failed = self._watch() if self.under_way else {}
        if failed is None:
            self.say("skipped: the first start will be slower; fab rebuild reads what is left")
        elif failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise SnapshotError(f"not read ahead: {reasons}; again with: fab rebuild")
        elif cold := _cold(there):
            self.cloud.tag("disk", [disk.disk_id for disk in cold], {WARMED_TAG: YES})

    def _begin_reading(self, there: Existing) -> None:
        """Read what training needs, on the nodes whose disks nobody has read yet, while something else goes on."""
        serials = {disk.serial for disk in _cold(there)}
        if not serials:
            return
        nodes = rented_nodes(self.cloud, self.settings)
        asked = [node for node in nodes if node.disk_serial in serials]

        def groups() -> dict[str, Groups]:
            wait_for_data([nodes[0], *asked])
            run = look(nodes[0], self.settings.deploy_command)["run"]
            models = self._models_to_warm(run)
            return {node.name: groups_for(node.rank, models, run) for node in asked}

        self.under_way.append(begin(asked, groups))

    def _watch(self) -> Mapping[str, str] | None:
        """Wait for what is being read: by node why it failed; None where Ctrl-C skipped the rest."""
        reading = self.under_way.pop()
        with progress() as at:
            failed = reading.watch(at)
        self.phases.add("read ahead", reading.began, reading.ended or time.time())
        return failed

    def _models_to_warm(self, run: dict[str, Any] | None) -> list[str]:
        if self.model:
            return [self.model]
        return [run["model_dir"]] if run and run["model_dir"] else list(self.models)
