"""A real cluster on this machine for the end to end tests, driven by the commands a user types."""

import json
import os
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


class LocalCluster:
    """Hosts of the local cloud under a name and subnet of their own."""

    def __init__(self, folder, name="e2e", nodes=4, subnet="10.213.79.0/24"):
        self.folder = Path(folder)
        self.toml = self.folder / "cluster.toml"
        self.toml.write_text(TOML.format(name=name, nodes=nodes, subnet=subnet))
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
            ["pyinfra", "-y", "--json", "inventory/local.py", "deploy/base.py"],
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


def wait_for(what, condition, timeout_s):
    """Poll until the condition gives something true; what it gave. AssertionError naming `what` otherwise."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.5)
    raise AssertionError(f"not within {timeout_s} s: {what}")
