"""A real cluster on this machine for the end to end tests, driven by the commands a user types."""

import copy
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

TOML = """\
name = "{name}"
provider = "local"
[local]
nodes = {nodes}
disk_gib = 8
subnet = "{subnet}"
"""


class TypedCluster:
    """A cluster that is driven as a user drives one: a cluster.toml, and commands typed in the checkout."""

    inventory = ""
    """The pyinfra inventory its base deploys go by."""

    def __init__(self, folder, toml):
        self.folder = Path(folder)
        self.toml = self.folder / "cluster.toml"
        self.toml.write_text(toml)
        self.env = {
            **os.environ,
            "SPOTUNE_CLUSTER": str(self.toml),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "160",
        }

    def call(self, *argv, timeout=600, env=None):
        """Run a command from the checkout; the finished process, output and errors together in `.stdout`."""
        done = subprocess.run(
            [str(a) for a in argv],
            cwd=ROOT,
            env={**self.env, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        return done

    def fab(self, *argv, timeout=600):
        return self.call("fab", *argv, timeout=timeout)

    def deploy(self, timeout=1500):
        """One base deploy; (exit code, pyinfra's JSON results, its log)."""
        done = subprocess.run(
            ["pyinfra", "-y", "--json", self.inventory, "deploy/base.py"],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        start = done.stdout.find("{")
        return done.returncode, json.loads(done.stdout[start:]) if start >= 0 else {}, done.stderr

    @property
    def cluster(self):
        from inventory.cluster import load_cluster

        return load_cluster(self.toml)

    def node(self, name):
        return next(n for n in self.cluster.nodes if n.name == name)

    def on(self, name, command, check=True, timeout=60):
        """A shell command on a node; its output."""
        from inventory.ssh import ssh_options

        node = self.node(name)
        done = subprocess.run(
            ["ssh", *ssh_options(node), f"{node.user}@{node.address}", command],
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode:
            raise AssertionError(f"{name}: {command!r} ended with {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout


class LocalCluster(TypedCluster):
    """Hosts of the local cloud under a name and subnet of their own."""

    inventory = "inventory/local.py"

    def __init__(self, folder, name="e2e", nodes=4, subnet="10.213.79.0/24"):
        super().__init__(folder, TOML.format(name=name, nodes=nodes, subnet=subnet))

    def without(self, name):
        """The same hosts but one, as a cluster.toml that lists machines names them."""
        nodes = [node for node in self.cluster.nodes if node.name != name]
        lines = [f'name = "{self.cluster.settings.name}"', 'provider = "static"', "[ssh]"]
        lines += [f'key = "{nodes[0].key}"', f'known_hosts = "{nodes[0].known_hosts}"']
        for node in nodes:
            lines += ["[[nodes]]", f'name = "{node.name}"', f'address = "{node.address}"', "gpus = 0"]
        toml = self.folder / f"without-{name}.toml"
        toml.write_text("\n".join(lines) + "\n")
        fewer = copy.copy(self)
        fewer.toml, fewer.env = toml, {**self.env, "SPOTUNE_CLUSTER": str(toml)}
        return fewer


def wait_for(what, condition, timeout_s):
    """Poll until the condition gives something true; what it gave. AssertionError naming `what` otherwise."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.5)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def run_id_in(output):
    return re.search(r"tiny-\d{8}-\d{6}", output)[0]


class DisturbedRun:
    """One run that is broken again and again, and resumed each time."""

    def __init__(self, local, *flags):
        self.local = local
        started = local.fab("train", *flags, "--detach")
        assert started.returncode == 0, started.stdout
        self.run_id = run_id_in(started.stdout)
        self.folder = f"/data/runs/{self.run_id}"

    def steps(self):
        told = self.local.on("te1", f"tail -n 1 {self.folder}/metrics.jsonl 2>/dev/null; true")
        return json.loads(told)["step"] if told.strip() else 0

    def wait_beyond(self, step):
        wait_for(f"step {step} of {self.run_id}", lambda: self.steps() > step, 120)

    def checkpoints(self):
        names = self.local.on("te1", f"ls {self.folder}/checkpoints 2>/dev/null; true").split()
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))

    def status(self):
        """What status.json says; as one that is starting where it is not there yet."""
        told = self.local.on("te1", f"cat {self.folder}/status.json 2>/dev/null; true")
        return json.loads(told or '{"state": "starting"}')

    def wait_until_failed(self, within_s):
        def failed():
            status = self.status()
            return status if status["state"] == "failed" else None

        return wait_for(f"{self.run_id} has failed", failed, within_s)

    def ranks_on(self, name):
        return self.local.on(name, f"pgrep -af 'training.finetune.*[-]-run.*{self.run_id}'; true").splitlines()

    def resume(self, *flags, local=None):
        before = self.checkpoints()[-1]
        done = (local or self.local).fab("train", "--resume", self.run_id, *flags, "--detach")
        assert done.returncode == 0, done.stdout
        assert f"goes on from step {before}" in done.stdout
        return done
