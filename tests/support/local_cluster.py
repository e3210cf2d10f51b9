"""A real cluster on this machine for the end to end tests, rented from its own cloud by the commands a user types."""

import copy
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

TOML = """\
name = "{name}"
[aliyun]
endpoint = "local"
nodes = {nodes}
hours = 2
data_disk_gib = 20
keep_data_disk = "{keep_data_disk}"
[local]
subnet = "{subnet}"
metadata_address = "{metadata}"
"""


class LocalCluster:
    """Machines that `fab up` rents from a cloud of this cluster's own, whose state is below `folder`."""

    inventory = "inventory/aliyun.py"
    """The pyinfra inventory its base deploys go by."""

    def __init__(
        self,
        folder,
        *,
        name="e2e",
        nodes=2,
        subnet="10.213.79.0/24",
        keep_data_disk="head",
        models=("tiny",),
        evidence=None,
    ):
        self.folder = Path(folder)
        self.toml = self.folder / "cluster.toml"
        metadata = f"100.100.100.{subnet.split('.')[2]}"
        self.toml.write_text(
            TOML.format(name=name, nodes=nodes, subnet=subnet, metadata=metadata, keep_data_disk=keep_data_disk)
            + f"[models]\nnames = {json.dumps([*map(str, models)])}\n"
        )
        self.name = name
        self.evidence = evidence
        self.state = self.folder / "state"
        self.records = self.folder / "records"
        self.records.mkdir()
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("ALIBABA_CLOUD_")},
            "SPOTUNE_CLUSTER": str(self.toml),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "160",
            "XDG_STATE_HOME": str(self.state),
            "SPOTUNE_ECS_RECORD": str(self.records),
        }  # the user's own account is none of a test's business

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
        if self.evidence:
            self.evidence.said(" ".join(map(str, argv)), done.stdout)
        return done

    @contextmanager
    def started(self, *argv):
        """A command from the checkout that goes on meanwhile, and the file with what it says."""
        log = self.folder / f"{'-'.join(argv[:2])}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=self.env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        try:
            yield process, log
        except BaseException:
            print(log.read_text())
            raise
        finally:
            process.kill()
            process.wait()
            if self.evidence:
                self.evidence.said(" ".join(argv), log.read_text())

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
        if self.evidence:
            self.evidence.said("base deploy", done.stderr)
        start = done.stdout.find("{")
        return done.returncode, json.loads(done.stdout[start:]) if start >= 0 else {}, done.stderr

    @contextmanager
    def at_home(self):
        """Inside, this process looks for state where the commands do."""
        before = {name: os.environ.get(name) for name in ("XDG_STATE_HOME", "SPOTUNE_ECS_RECORD")}
        os.environ.update({name: self.env[name] for name in before})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    @cached_property
    def cluster(self):
        """Settings and nodes; asked of the cloud again after `changed`."""
        from inventory.cluster import load_cluster

        with self.at_home():
            return load_cluster(self.toml)

    def changed(self):
        """Machines came or went."""
        self.__dict__.pop("cluster", None)

    @property
    def cloud_folder(self):
        """Where the cloud on this machine keeps its world, its log and its disks."""
        return self.state / "spotune" / "localcloud" / self.name

    @cached_property
    def ecs(self):
        """The API, asked as the program asks it."""
        from inventory.aliyun_ecs.client import Ecs
        from inventory.settings import load_settings

        with self.at_home():
            return Ecs.open(load_settings(self.toml))

    def serve(self):
        done = self.fab("local.serve", timeout=900)
        assert done.returncode == 0, done.stdout
        return done

    def up(self, *flags):
        done = self.fab("up", "--yes", *flags)
        self.changed()
        assert done.returncode == 0, done.stdout
        return done

    def rebuild(self, *flags):
        done = self.fab("rebuild", "--yes", *flags, timeout=1500)
        self.changed()
        assert done.returncode == 0, done.stdout
        return done

    def down(self, *flags):
        done = self.fab("down", "--yes", *flags)
        self.changed()
        assert done.returncode == 0, done.stdout
        return done

    def happens(self, what, *argv):
        """What the cloud does to a machine: off, on, cut, heal, reclaim."""
        done = self.fab(f"local.{what}", *argv)
        assert done.returncode == 0, done.stdout

    def cut(self, name):
        """As `fab local.cut`, at once: steps do not wait until it has started."""
        from inventory.localcloud import served
        from inventory.localcloud.places import Places

        with self.at_home():
            served.cut(Places.of(self.name), name)

    def reclaim(self, name, notice_s=300.0):
        """As `fab local.reclaim`, at once: what stands still meanwhile may do so for a short time alone."""
        from inventory.localcloud import control
        from inventory.localcloud.places import Places

        with self.at_home():
            control.reclaim(Places.of(self.name), name, notice_s)

    def leave(self):
        """Nothing of it stays on this machine, whatever state it is in."""
        self.changed()
        self.fab("local.down", "--yes")

    def host_keys(self):
        """Each machine's own host key, as it shows it itself."""
        names = [node.name for node in self.cluster.nodes]
        return {name: self.on(name, "cat /etc/ssh/ssh_host_ed25519_key.pub").split()[1] for name in names}

    def node(self, name):
        return next(n for n in self.cluster.nodes if n.name == name)

    def on(self, name, command, check=True, timeout=60):
        """A shell command on a node; its output."""
        from tests.support.ssh_program import ssh_options

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

    def listed(self, but=""):
        """The same machines, but for one, as a cluster.toml that lists machines names them."""
        nodes = [node for node in self.cluster.nodes if node.name != but]
        lines = [f'name = "{self.name}"', 'provider = "static"', "[python]", 'provider = "venv"', 'torch = "cpu"']
        lines += ["[ssh]", f'key = "{nodes[0].key}"', f'known_hosts = "{nodes[0].known_hosts}"']
        for node in nodes:
            lines += ["[[nodes]]", f'name = "{node.name}"', f'address = "{node.address}"', "gpus = 0"]
            lines += [f'disk_serial = "{node.disk_serial}"']
        toml = self.folder / f"listed-{but}.toml"
        toml.write_text("\n".join(lines) + "\n")
        same = copy.copy(self)
        same.changed()
        same.inventory = "inventory/static.py"
        same.toml, same.env = toml, {**self.env, "SPOTUNE_CLUSTER": str(toml)}
        return same


def run_id_in(output):
    return re.search(r"\b(tiny|mine)-\d{8}-\d{6}", output)[0]


RANKS = "^rank [0-9]+$"
"""What ranks call themselves, for `pkill`."""


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
        until(lambda: self.steps() > step, f"step {step} of {self.run_id}", 120)

    def hold_beyond(self, step, timeout_s=120):
        """Stops the head's ranks once the run is beyond a step, so that it does not end first. `go_on` has to follow
        within 30 s: then the other ranks take them for lost."""
        beyond = f"[ $(cat {self.folder}/metrics.jsonl 2>/dev/null | wc -l) -gt {step} ]"
        look = f"until {beyond}; do sleep 0.05; done; pkill -STOP '{RANKS}'"
        self.local.on("te1", f"timeout {timeout_s} sh -c {shlex.quote(look)}", timeout=timeout_s + 10)

    def go_on(self):
        self.local.on("te1", f"pkill -CONT '{RANKS}'")

    @contextmanager
    def crawling(self):
        """Its ranks, which are held, do a step or a few every 20 s; held again at the end."""
        over = threading.Event()

        def crawl():
            while not over.wait(20):
                with suppress(AssertionError):  # they are just ending, or starting again
                    step = self.steps()
                    self.go_on()
                    self.hold_beyond(step)

        thread = threading.Thread(target=crawl)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def saved_by(self):
        """How many ranks had saved what its newest start went on from."""
        told = self.local.on("te1", f"grep resumed {self.folder}/logs/events.jsonl | tail -n 1")
        return json.loads(told)["ranks"]

    def stop(self):
        """Of a run that is held: it is asked to stop before it goes on."""
        self.local.on("te1", f"systemctl stop --no-block spotune-{self.run_id}")
        self.go_on()
        until(lambda: self.status()["state"] == "stopped", f"{self.run_id} has stopped", 60)

    def wait_until_stepping(self, timeout_s=120):
        """Until a start that was asked for just now is at its steps. Waited for on the head itself, since a look from
        here may take seconds; what its progress said before belongs to the start before."""
        file = f"{self.folder}/progress/rank-0"
        there = f"[ {file} -nt /tmp/asked ] && ! grep -Eq 'prepare|load' {file}"
        look = f"touch /tmp/asked; until {there}; do sleep 0.05; done"
        self.local.on("te1", f"timeout {timeout_s} sh -c {shlex.quote(look)}", timeout=timeout_s + 10)

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

        return until(failed, f"{self.run_id} has failed", within_s)

    def hosts(self):
        """The names of its hosts, as its ranks count them."""
        return [host["name"] for host in json.loads(self.local.on("te1", f"cat {self.folder}/launch.json"))["hosts"]]

    def rank_on(self, name):
        return self.hosts().index(name)

    def ranks_on(self, name):
        return self.local.on(name, f"pgrep -a '{RANKS}' | grep {self.run_id}; true").splitlines()

    def resume(self, *flags, local=None):
        before = self.checkpoints()[-1]
        done = (local or self.local).fab("train", "--resume", self.run_id, *flags, "--detach")
        assert done.returncode == 0, done.stdout
        assert f"goes on from step {before}" in done.stdout
        return done
