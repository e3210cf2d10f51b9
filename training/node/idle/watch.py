"""`hours_idle` without a laptop: on the head, from a run's start on, as a unit of its own.

python -m training.node.idle.watch --hours-idle 1 --nodes te1 te2 ... (training/laptop/idle_watch.py starts it)

Once a minute it asks all nodes who uses them. When nobody did for `hours_idle`, less the half hour that the cloud
wants ahead, it lets the machines go as soon as those hours are over; who comes before gets the planned time back,
which the laptop wrote into the machines' tags. It never lets a machine stay longer than that, moves only machines that
it asks, and what it cannot do is left as it was planned.
"""

from __future__ import annotations

import argparse
import ipaddress
import itertools
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from training.node.idle.ecs import Ecs, Machine, Releases
from training.reclaim import FOLDER, RELEASE, release_text
from training.users import USERS, first_user

EVERY_S = 60.0
EARLIEST_S = 35 * 60.0
"""The cloud takes no release time nearer than 30 minutes and drops the seconds."""
SAME_S = 120.0
AGAIN_S = 300.0
"""While somebody uses the machines the cloud is asked so often whether they stay as planned."""
NODE_S = 20.0
ASKED = "asked-all"
"""Ends an answer that is whole."""
RUNS = "systemctl list-units --plain --no-legend --state=active,activating,deactivating 'spotune-*' || echo unknown"
LOGINS = (
    f"journalctl -q -u ssh -u sshd --since -{EVERY_S + 15:.0f}s -o cat --grep '^Accepted' 2>/dev/null | "
    r"sed -n 's/^Accepted .* from \([^ ]*\) port \([0-9]*\).*/login \1:\2/p'"
)
"""Who came by ssh since the last look, and may be gone again."""
_RUN = re.compile(r"spotune-(\S+-\d{8}-\d{6}\S*)\.service|unknown")


class Cloud(Protocol):
    """What is asked of the cloud. Both raise OSError."""

    def releases(self) -> Releases: ...

    def release(self, instance_id: str, at: float) -> None: ...


class Use(NamedTuple):
    """Who uses a node, in words; empty where nobody does."""

    words: str = ""
    is_now: bool = False
    """He is there; else he was since the last look."""


@dataclass
class Watch:
    """One head's watch over the machines with these addresses."""

    idle_s: float
    cloud: Cloud
    users: Callable[[], Use]
    own: Collection[str]
    folder: Path = FOLDER
    clock: Callable[[], float] = time.monotonic
    idle_since: float | None = None
    sooner: dict[str, float] = field(default_factory=dict)
    """When the machines go that this brought forward, by their ids."""
    moved_back: float = -math.inf
    """When that was done last: somebody else may bring the end forward."""
    said: str = ""

    def step(self) -> None:
        """Look once. What fails is said once and tried again with the next look."""
        try:
            self._step()
        except OSError as error:
            self._say(f"the machines go as planned: {error}")

    def _step(self) -> None:
        use, now = self.users(), self.clock()
        if use.words:
            came = self.idle_since is not None or now - self.moved_back >= AGAIN_S
            if self.sooner or (use.is_now and came):
                self._move_back(use)
                self.moved_back = now
            self.idle_since = None
            return
        self.idle_since = now if self.idle_since is None else self.idle_since
        idle_s = now - self.idle_since
        if idle_s >= self.idle_s - EARLIEST_S:
            self._bring_forward(max(EARLIEST_S, self.idle_s - idle_s))

    def _watched(self) -> tuple[dict[str, Machine], float]:
        """The machines whose users are asked for, by their ids; and the time."""
        found = self.cloud.releases()
        return {name: each for name, each in found.machines.items() if each.address in self.own}, found.now

    def _bring_forward(self, ahead_s: float) -> None:
        machines, now = self._watched()
        if any(each.at and each.at - self.sooner.get(name, each.at) > SAME_S for name, each in machines.items()):
            self.sooner.clear()
            self.idle_since = self.clock()
            self._say("somebody moved the release time: the machines idle from now on")
            return
        sooner = now + ahead_s
        for name, each in machines.items():
            # what is planned half an hour later at least can be given back until the last moment
            if each.at is not None and each.planned and each.at - sooner > EARLIEST_S:
                self.sooner[name] = sooner  # before: an answer may be lost
                self._tell_runs(min(self.sooner.values()))
                self.cloud.release(name, sooner)
                self._say(f"nothing uses the machines: they are released at {release_text(sooner)} (hours_idle)")

    def _move_back(self, use: Use) -> None:
        machines, now = self._watched()
        ends = []
        for name, each in machines.items():
            if each.at is None:
                continue
            wanted = each.planned if use.is_now or name in self.sooner else None
            end = each.at
            if wanted is not None and wanted - end > SAME_S and wanted > now + EARLIEST_S:
                self.cloud.release(name, wanted)
                self._say(f"{use.words}: the machines stay as planned")
                end = wanted
            self.sooner.pop(name, None)
            ends.append(end)
        self.sooner.clear()
        self._tell_runs(min(ends, default=0.0))

    def _tell_runs(self, at: float) -> None:
        """A run that starts meanwhile leaves before that."""
        if not at:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / f"{RELEASE}.idle"
        fresh.write_text(f"{release_text(at)}\n", encoding="utf-8")
        fresh.replace(self.folder / RELEASE)

    def _say(self, line: str) -> None:
        if line != self.said:
            self.said = line
            print(line, flush=True)


def users_of(nodes: Sequence[str], own: Collection[str], port: int) -> Use:
    """Who uses the nodes, the head first.

    `own`: the nodes' addresses, among which ssh is no use. Another node that does not answer is used by nobody: what
    was on it went with it, or ended with its run. A head that cannot answer itself may have a run.
    """
    sessions = f"ss -Htn state established '( sport = :{port} )' | sed 's/^/session /'; {LOGINS}"
    questions = [["sh", "-c", f"{RUNS}; {USERS}; {sessions}; echo {ASKED}"]]
    options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "UpdateHostKeys=no")
    questions += [["ssh", *options, node, f"{USERS}; {sessions}; echo {ASKED}"] for node in nodes[1:]]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(_answer, questions))
    if ASKED not in answers[0].splitlines():
        return Use(f"{nodes[0]}: its users are not known", is_now=True)
    among = frozenset(own)
    found = [(node, use(answer, among)) for node, answer in zip(nodes, answers, strict=True)]
    words = "; ".join(f"{node}: {each.words}" for node, each in found if each.words)
    return Use(words, any(each.is_now for _, each in found))


def _answer(argv: Sequence[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=NODE_S, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


def use(answer: str, own: frozenset[str]) -> Use:
    """Who uses a node, by what it printed. Pure."""
    others, visit = [], Use()
    for line in answer.splitlines():
        if line.startswith(("session ", "login ")):
            if (peer := _peer(line)) in own:
                continue
            if line.startswith("session "):
                return Use(f"ssh from {peer}", is_now=True)
            visit = Use(f"ssh from {peer}, over by now")
        elif match := _RUN.match(line):
            return Use(f"run {match[1]}" if match[1] else "its runs are not known", is_now=True)
        elif not line.startswith("spotune-") and line != ASKED:
            others.append(line)
    present = first_user("\n".join(others))
    return Use(present, is_now=True) if present else visit


def _peer(line: str) -> str:
    """The address behind a line: of ss (Recv-Q, Send-Q, here, there), or of a login."""
    text = line.rsplit(maxsplit=1)[-1].rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return str(getattr(address, "ipv4_mapped", None) or address)


def main() -> None:
    """Watch until ended, or for so many looks."""
    parser = argparse.ArgumentParser(prog="python -m training.node.idle.watch")
    for name in ("endpoint", "region", "role", "metadata", "tag-key", "tag-value"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--hours-idle", type=float, required=True)
    parser.add_argument("--nodes", nargs="+", required=True, help="all of the cluster, the head first")
    parser.add_argument("--own", nargs="+", required=True, help="their addresses")
    parser.add_argument("--port", type=int, default=22, help="of ssh")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between two looks")
    parser.add_argument("--looks", type=int, default=0, help="ends after so many; 0: never")
    asked = parser.parse_args()
    os.umask(0o022)
    cloud = Ecs(asked.endpoint, asked.region, asked.role, asked.metadata, (asked.tag_key, asked.tag_value))
    own = [*asked.own, "127.0.0.1", "::1"]
    watch = Watch(asked.hours_idle * 3600, cloud, lambda: users_of(asked.nodes, own, asked.port), own)
    for _ in range(asked.looks) if asked.looks else itertools.count():
        watch.step()
        time.sleep(asked.every)


if __name__ == "__main__":
    main()
