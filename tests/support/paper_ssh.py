"""A stand-in for ssh to machines on paper: what the commands that rent, keep and rebuild ask of a machine is answered
as a fresh host with an empty data disk would, and only where its host key was pinned before.

`python -m tests.support.paper_ssh up --yes` is `fab up --yes` with it;
$SPOTUNE_PAPER_WORLD names the cloud's world.json, $SPOTUNE_PAPER_END where the process ends.
"""

import base64
import hashlib
import json
import os
import shlex
import sys
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from inventory.aliyun_ecs.client import Ecs
from inventory.localcloud.ecs import account as accounts
from inventory.ssh import SshError
from snapshots.create import FROZEN
from tests.support.fake_machines import FakeMachines
from training.laptop.head_node import HeadError
from training.laptop.on_head import fs

OURS = str(Path(__file__).parents[2] / "inventory")
WORLD, END = "SPOTUNE_PAPER_WORLD", "SPOTUNE_PAPER_END"
MADE_BY_NAME = (
    "inventory.ssh.connect",
    "snapshots.create.connect",
)
"""Every name under which a connection is opened."""
LOOK = {
    "mounted": True,
    "filesystem": "ext4",
    "used_bytes": 3 << 30,
    "environment": {"stamp": {"hash": "0" * 64, "torch": "2.13.0", "python": "3.12"}},
    "models": [],
    "run": None,
}


def host_key(instance_id):
    """A machine's public host key: of nothing but its id, so that every process knows it."""
    kind = b"ssh-ed25519"
    blob = len(kind).to_bytes(4, "big") + kind + (32).to_bytes(4, "big") + hashlib.sha256(instance_id.encode()).digest()
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


class KeyedPaper(FakeMachines):
    """Machines on paper whose host keys cost no process to make."""

    def _host_key(self, instance):
        return f"{host_key(instance.instance_id)} root@{instance.hostname}\n".encode()


class Connection:
    """What inventory.ssh uses of a connection."""

    user = "root"

    def __init__(self, node, frozen):
        self.host, self.frozen = node.address, frozen
        self.transport = SimpleNamespace(close=lambda: None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Nothing is open."""

    def run(self, line, **_):
        opening, command = shlex.split(line)[2].removesuffix(" exit $1").split("(\n", 1)
        mark = opening.split()[2].rstrip(";")
        told = self._answer(command.rpartition("\n);")[0])
        return SimpleNamespace(stdout=f"\n{mark}\n{told}\n{mark}\n", stderr="", exited=0, failed=False)

    def _answer(self, command):
        if command.startswith("python3 -c "):
            return self._told_by_program(shlex.split(command)[3:])
        if "fsfreeze --freeze" in command:
            self.frozen.add(self.host)
            return ""
        if "fsfreeze --unfreeze" in command:
            was = FROZEN if self.host in self.frozen else ""
            self.frozen.discard(self.host)
            return was
        if command == "true":  # that it answers
            return ""
        raise AssertionError(f"a machine on paper does not know: {command}")

    def _told_by_program(self, arguments):
        if arguments == ["/data"]:  # snapshots/on_node/look.py
            return json.dumps(LOOK)
        assert arguments == [], arguments  # deploy/on_node/keep_packages.py
        return json.dumps({"packages": 0, "bytes": 0})


def _asked(head, paper, verb, *arguments):
    try:
        return paper.ask(head, verb, *arguments)
    except SshError as error:
        raise HeadError(str(error)) from error


class PaperSsh:
    """`with PaperSsh(world):` lets this process reach the machines of the world that `world()` gives."""

    def __init__(self, world):
        self.world = world
        self.frozen = set()
        """Addresses whose /data is frozen."""
        self.told = []
        """Who was told until when it is rented, in which words."""

    def connect(self, node, timeout_s=10):
        there = next((i for i in self.world().instances.values() if i.address == node.address), None)
        if there is None or there.status != "Running":
            raise SshError(f"{node.name} ({node.address}:22): cannot be reached: timed out")
        pinned = [line.split()[:3] for line in node.known_hosts.read_text().splitlines()]
        if [node.address, *host_key(there.instance_id).split()] not in pinned:
            raise SshError(f"{node.name} ({node.address}:22): its host key is not in {node.known_hosts}")
        return Connection(node, self.frozen)

    def ask(self, head, verb, *arguments):
        """A head without runs, which takes what is written to it."""
        connection = self.connect(head.node)
        if verb is fs.write:  # until when it is rented
            self.told.append((connection.host, arguments[1]))
            return None
        return {"looks": [], "details": [], "starting": None}[verb.__name__]

    def __enter__(self):
        self._patches = [patch(name, self.connect) for name in MADE_BY_NAME]
        self._patches += [patch("training.laptop.head_node.RemoteHead.ask", partialmethod(_asked, self))]
        self._patches += [patch("inventory.renting.machines.ANSWER_S", 0.1)]
        self._patches += [patch("inventory.renting.machines.ASK_EVERY_S", 0.01)]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_):
        for each in self._patches:
            each.stop()


def end_itself(calls, steps, how):
    """Let this process get the signal `how` in its call of the cloud's API of that number or after it: so many function
    calls and returns further in that thread, and then in the next function of spotune's, as Python's own locks do not
    stand a KeyboardInterrupt in the middle of them."""
    once = Ecs.once

    def count(frame, event, argument):
        nonlocal steps
        steps -= 1
        if steps <= 0 and frame.f_code.co_filename.startswith(OURS):
            sys.setprofile(None)
            os.kill(os.getpid(), how)

    def counted(*call):
        nonlocal calls
        calls -= 1
        if calls == 0:
            sys.setprofile(count)
        return once(*call)

    Ecs.once = counted


def main():
    from fabric.main import program

    if END in os.environ:
        end_itself(*map(int, os.environ[END].split()))
    with PaperSsh(lambda: accounts.load(Path(os.environ[WORLD]))):
        program.run(["fab", *sys.argv[1:]])


if __name__ == "__main__":
    main()
