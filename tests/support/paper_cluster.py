"""A cluster rented from the local cloud's API over machines on paper: everything is real but the machines."""

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from inventory.aliyun_ecs.client import Ecs
from inventory.cloud.pace import CallPace
from inventory.renting import down, tags
from inventory.renting.machines import apply_plan
from inventory.renting.plan import RentalWish, plan_up
from inventory.renting.tags import StateFiles
from inventory.settings import load_settings
from tests.support.ecs_api import EcsApi

ROOT = Path(__file__).parents[2]
FAST = CallPace(
    first_s=0.01, longest_s=0.05, poll_s=0.02, wait_limit_s=10, throttled_s=0.2, settle_s=0.3, listed_s=0.4, read_s=3
)
TOML = """\
name = "{name}"
provider = "aliyun"
[ssh]
key = "{folder}/no-key-of-the-users"
[aliyun]
endpoint = "local"
{aliyun}
[local]
wait_factor = 0.02
"""
SMALL = 'types = ["ecs.local.small"]\ndata_disk_gib = 20\n'


@cache
def rsa_key():
    """A key pair, made once: it takes a second of a processor."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        argv = ["ssh-keygen", "-q", "-t", "rsa", "-b", "3072", "-N", "", "-C", "paper", "-f", str(key)]
        subprocess.run(argv, check=True)
        return key.read_bytes(), key.with_name("key.pub").read_bytes()


class PaperCluster:
    """`monkeypatch` gives it a state folder of its own, which has the cluster's key already."""

    def __init__(self, tmp_path, monkeypatch, aliyun=SMALL, name="demo"):
        self.folder, self.name, self.said = tmp_path, name, []
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setattr("inventory.renting.machines.reached", lambda *_: None)  # nobody answers ssh
        self.api = EcsApi(tmp_path / "api")
        self.write(aliyun)
        self.places.make()
        private, public = rsa_key()
        self.places.own_key.write_bytes(private)
        self.places.own_key.chmod(0o600)
        self.places.own_key.with_name("id_rsa.pub").write_bytes(public)

    def __enter__(self):
        self.api.__enter__()
        self.api.write_local_state(self.name)
        return self

    def __exit__(self, *error):
        self.api.__exit__(*error)

    def write(self, aliyun):
        self.toml = self.folder / "cluster.toml"
        self.toml.write_text(TOML.format(name=self.name, folder=self.folder, aliyun=aliyun))
        self.settings = load_settings(self.toml)

    @property
    def cloud(self):
        return Ecs.open(self.settings, pace=FAST)

    @property
    def places(self):
        return StateFiles.of(self.name)

    def plan(self, nodes, hours=4, *, snapshot=None, partial=False, extend=False, others=False):
        wish = RentalWish(nodes, hours, snapshot, partial, extend, others=others)
        return plan_up(self.cloud, self.settings, wish)

    def up(self, nodes, hours=4, **wish):
        plan = self.plan(nodes, hours, **wish)
        return apply_plan(self.cloud, self.settings, plan, self.said.append)

    def down(self, disks=False, **more):
        plan = down.plan_down(self.cloud, self.settings, disks, **more)
        down.apply_down(self.cloud, self.settings, plan, self.said.append)
        return plan

    @property
    def machines(self):
        """What the cloud has of ours, by name."""
        return {i.name: i for i in self.cloud.instances(tags=tags.of_cluster(self.name))}

    @property
    def data_disks(self):
        return [d for d in self.cloud.disks(tags=tags.of_cluster(self.name)) if d.kind == "data"]

    def calls(self, action):
        return [parameters for name, parameters in self.api.calls if name == action]

    def fab(self, *argv, **more):
        return self._run("fab", argv, **more)

    def pyinfra(self, *argv):
        return self._run("pyinfra", argv)

    def _run(self, program, argv, **more):
        return subprocess.run(
            [Path(sys.executable).with_name(program), *argv],
            cwd=ROOT,
            env={**os.environ, "SPOTUNE_CLUSTER": str(self.toml)},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            **more,
        )
