"""A cloud and a cluster that faults are tried out on: served in this process, over machines on paper, and put back
to an earlier state as often as wanted. The commands are a user's own."""

import contextlib
import io
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from invoke import Config, Context, Exit

import deploy.tasks
from inventory.localcloud.ecs import lifecycle
from inventory.localcloud.ecs.account import Account
from inventory.renting.tags import StateFiles
from inventory.renting.workload import HandedOver
from snapshots.node_disks import ReadAhead
from tests.support.ecs_api import EcsApi
from tests.support.idle import wait_until_idle
from tests.support.paper_ssh import KeyedPaper, PaperSsh
from training.laptop.workload import TrainingWorkload

TOML = """\
name = "drill"
provider = "aliyun"
[ssh]
key = "{folder}/none"
[aliyun]
endpoint = "local"
types = ["ecs.local.small"]
zones = ["cn-hangzhou-h", "cn-hangzhou-i"]
nodes = 2
data_disk_gib = {disk_gib}
[local]
wait_factor = {wait_factor}
"""
TAKES_TIME = ("DescribeSnapshots", "DescribeImages", "DescribeVpcs", "DescribeVSwitches")
"""Where something is waited for that needs some seconds of the cloud's clock."""


class WatchedApi(EcsApi):
    """The API, with a word to say before each call."""

    def __init__(self, folder, boot_s=0):
        super().__init__(folder)
        self.paper = KeyedPaper(self.folder / "paper", boot_s)
        self.before = lambda number, action: None
        """Called before each call is done, with how many there were before it."""

    def _seen(self, action, parameters):
        self.before(len(self.calls), action)
        super()._seen(action, parameters)


class SettledApi(WatchedApi):
    """With a world that has come to rest before each call, so that a command always makes the same calls."""

    def _seen(self, action, parameters):
        wait_until_idle(self.cloud)
        if action in TAKES_TIME:
            self.cloud.account.clock_offset_s += 2
        super()._seen(action, parameters)


@dataclass
class Ended:
    """How a command ended."""

    code: int
    sentence: str
    output: str


@dataclass
class State:
    """The cloud and what this machine keeps of it, to go back to."""

    world: str
    files: dict = field(default_factory=dict)


class DrillWorkload(TrainingWorkload):
    """Asks the head on paper all but its trainings."""

    def trainings(self, cloud, settings):
        return None


HANDED_OVER = Context(
    Config(
        overrides={
            "spotune": HandedOver(
                DrillWorkload(), lambda _: None, deploy.tasks.KEEP_PACKAGES, deploy.tasks.cpu_requirements
            )
        }
    )
)


class Range:
    """One cloud, one cluster, and the commands of a user as fab would run them; ssh is the only stand-in."""

    wait_factor = 0.0001

    def __init__(self):
        self._stack = contextlib.ExitStack()
        shared_memory = Path("/dev/shm")
        self.folder = Path(
            self._stack.enter_context(
                tempfile.TemporaryDirectory(dir=shared_memory if os.access(shared_memory, os.W_OK) else None)
            )
        )
        self.toml = self.folder / "cluster.toml"
        self.places = StateFiles(self.folder / "state" / "spotune" / "clusters" / "drill")

    def __enter__(self):
        kept = {n: v for n, v in os.environ.items() if not n.startswith("ALIBABA_CLOUD_")}
        env = {**kept, "XDG_STATE_HOME": str(self.folder / "state"), "SPOTUNE_CLUSTER": str(self.toml)}
        self._stack.enter_context(patch.dict(os.environ, env, clear=True))
        self.api = self._stack.enter_context(self.served())
        self.api.write_local_state("drill")
        self.ssh = self._stack.enter_context(PaperSsh(lambda: self.world))
        # What a rebuild does over ssh once its machines are there.
        self._stack.enter_context(patch("snapshots.rebuild.base_deploy", lambda *_: 0))
        self._stack.enter_context(patch("snapshots.rebuild.begin", lambda *_: ReadAhead()))
        self.set_disk_gib(20)
        return self

    def __exit__(self, *error):
        return self._stack.__exit__(*error)

    def served(self):
        """The cloud's API."""
        return SettledApi(self.folder / "api")

    def set_disk_gib(self, disk_gib):
        self.toml.write_text(TOML.format(folder=self.folder, disk_gib=disk_gib, wait_factor=self.wait_factor))

    @property
    def world(self):
        return self.api.cloud.account

    @property
    def actions(self):
        """The calls made since the last going back, by name."""
        return [action for action, _ in self.api.calls]

    def fab(self, task, **flags):
        """Run a task as fab does; what it printed, its last sentence and its exit code."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                task.body(HANDED_OVER, **(dict.fromkeys(task.iterable, ()) | flags))
                end = Exit(code=0)
            except Exit as asked:
                end = asked
        self.settle()
        return Ended(end.code, end.message or "", said.getvalue())

    def settle(self):
        wait_until_idle(self.api.cloud)

    def hurry(self, seconds):
        """Put the cloud's clock forward."""
        self.world.clock_offset_s += seconds
        lifecycle.tick(self.api.cloud)
        self.settle()

    def state(self):
        """To go back to."""
        self.settle()
        files = {path: path.read_bytes() for path in self.places.folder.glob("*") if path.is_file()}
        return State(self.world.model_dump_json(), files)

    def go_back(self, state):
        self.settle()
        self.api.faults.clear()
        self.api.before = lambda number, action: None
        with self.api.cloud.lock:
            self.api.cloud.account = Account.model_validate_json(state.world)
            self.api.cloud.save()
        for path in self.places.folder.glob("*"):
            if path not in state.files:
                path.unlink()
        for path, content in state.files.items():
            path.write_bytes(content)
        self.ssh.frozen.clear()
        self.api.calls.clear()
        self._restore_blocks()

    def _restore_blocks(self):
        """Nothing was ever written to a disk on paper: a file of its length is all there is of it."""
        paper, world = self.api.paper, self.world
        wanted = {paper.disk(each.disk_id): each.size_gib for each in world.disks.values()}
        wanted |= {paper.snapshot(each.snapshot_id): each.disk_gib for each in world.snapshots.values()}
        for path in [*paper.folder.glob("disks/*"), *paper.folder.glob("snapshots/*")]:
            if path not in wanted:
                path.unlink()
        for path, gib in wanted.items():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                os.truncate(path, gib << 30)
