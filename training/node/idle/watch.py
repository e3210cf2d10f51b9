"""`hours_idle` without a laptop: on the head, from a run's start on, as a unit of its own.

python -m training.node.idle.watch --hours-idle 1 --nodes te1 te2 ... (training/laptop/idle_watch.py starts it)

Once a minute it asks all nodes who uses them. When nobody did for `hours_idle`, less the half hour that the cloud
wants ahead, it lets the machines go as soon as those hours are over; who comes before gets the planned time back.
It never lets a machine stay longer than planned, and what it cannot do is left as it was planned.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from training.node.idle.ecs import Ecs, Releases
from training.reclaim import FOLDER, RELEASE, release_text
from training.users import USERS, first_user

EVERY_S = 60.0
EARLIEST_S = 35 * 60.0
"""The cloud takes no release time nearer than 30 minutes and drops the seconds."""
SAME_S = 120.0
NODE_S = 20.0
RUNS = "systemctl list-units --plain --no-legend --state=active,activating,deactivating 'spotune-*' || echo unknown"
LOGINS = (
    f"journalctl -q -u ssh -u sshd --since -{EVERY_S + 15:.0f}s -o cat --grep '^Accepted' 2>/dev/null | "
    r"sed -n 's/^Accepted .* from \([^ ]*\) port \([0-9]*\).*/session - - - \1:\2/p'"
)
"""Who came by ssh since the last look, and may be gone again."""
_RUN = re.compile(r"spotune-(\S+-\d{8}-\d{6}\S*)\.service|unknown")


class Cloud(Protocol):
    """What is asked of the cloud. Both raise OSError."""

    def releases(self) -> Releases: ...

    def release(self, instance_id: str, at: float) -> None: ...


@dataclass
class Watch:
    """One head's watch. `users` says who uses the machines, in words; empty: nobody."""

    idle_s: float
    cloud: Cloud
    users: Callable[[], str]
    folder: Path = FOLDER
    clock: Callable[[], float] = time.monotonic
    idle_since: float | None = None
    planned: dict[str, float] = field(default_factory=dict)
    """When the machines that go sooner were to go, by their ids."""
    sooner: dict[str, float] = field(default_factory=dict)
    """When they go now."""
    said: str = ""

    def step(self) -> None:
        """Look once. What fails is said once and tried again with the next look."""
        try:
            self._step()
        except OSError as error:
            self._say(f"the machines go as planned: {error}")

    def _step(self) -> None:
        users, now = self.users(), self.clock()
        if users:
            self.idle_since = None
            if self.planned:
                self._move_back(users)
            return
        self.idle_since = now if self.idle_since is None else self.idle_since
        idle_s = now - self.idle_since
        if idle_s >= self.idle_s - EARLIEST_S:
            self._bring_forward(max(EARLIEST_S, self.idle_s - idle_s))

    def _bring_forward(self, ahead_s: float) -> None:
        found = self.cloud.releases()
        if any(at and at - self.sooner.get(each, at) > SAME_S for each, at in found.at.items()):
            self.planned.clear()
            self.sooner.clear()
            self.idle_since = self.clock()
            self._say("somebody moved the release time: the machines idle from now on")
            return
        sooner = found.now + ahead_s
        for each, at in found.at.items():
            if at is not None and at - sooner > SAME_S:
                self.cloud.release(each, sooner)
                self.planned[each], self.sooner[each] = at, sooner
                self._tell_runs(min(self.sooner.values()))
                self._say(f"nothing uses the machines: they are released at {release_text(sooner)} (hours_idle)")

    def _move_back(self, users: str) -> None:
        found = self.cloud.releases()
        for each, at in found.at.items():
            planned = self.planned.get(each)
            if planned and at is not None and planned - at > SAME_S and planned > found.now + EARLIEST_S:
                self.cloud.release(each, planned)
        self._tell_runs(min((max(at, self.planned.get(each, at)) for each, at in found.at.items() if at), default=0))
        self.planned.clear()
        self.sooner.clear()
        self._say(f"{users}: the machines stay as planned")

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


def users_of(nodes: Sequence[str], own: Iterable[str], port: int) -> str:
    """Who uses the nodes, the head first, in words; empty where nobody does.

    `own`: the nodes' addresses, among which ssh is no use. A node that does not answer is used by nobody: what was on
    it went with it, or ended with its run.
    """
    sessions = f"ss -Htn state established '( sport = :{port} )' | sed 's/^/session /'; {LOGINS}"
    questions = [["sh", "-c", f"{RUNS}; {USERS}; {sessions}"]]
    options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "UpdateHostKeys=no")
    questions += [["ssh", *options, node, f"{USERS}; {sessions}"] for node in nodes[1:]]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(_answer, questions))
    among = frozenset(own)
    found = (use(answer, among) for answer in answers)
    return "; ".join(f"{node}: {what}" for node, what in zip(nodes, found, strict=True) if what)


def _answer(argv: Sequence[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=NODE_S, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


def use(answer: str, own: frozenset[str]) -> str:
    """What uses a node, by what it printed; empty where nothing does. Pure."""
    others = []
    for line in answer.splitlines():
        if line.startswith("session "):
            if (peer := _peer(line)) not in own:
                return f"ssh from {peer}"
        elif not line.startswith("spotune-") and line != "unknown":
            others.append(line)
        elif match := _RUN.match(line):
            return f"run {match[1]}" if match[1] else "its runs are not known"
    return first_user("\n".join(others))


def _peer(line: str) -> str:
    """The address behind a line of ss: Recv-Q, Send-Q, here, there."""
    text = line.rsplit(maxsplit=1)[-1].rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return str(getattr(address, "ipv4_mapped", None) or address)


def main() -> None:
    """Watch until ended."""
    parser = argparse.ArgumentParser(prog="python -m training.node.idle.watch")
    for name in ("endpoint", "region", "role", "metadata", "tag-key", "tag-value"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--hours-idle", type=float, required=True)
    parser.add_argument("--nodes", nargs="+", required=True, help="all of the cluster, the head first")
    parser.add_argument("--own", nargs="+", required=True, help="their addresses")
    parser.add_argument("--port", type=int, default=22, help="of ssh")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between two looks")
    asked = parser.parse_args()
    os.umask(0o022)
    cloud = Ecs(asked.endpoint, asked.region, asked.role, asked.metadata, (asked.tag_key, asked.tag_value))
    own = [*asked.own, "127.0.0.1", "::1"]
    watch = Watch(asked.hours_idle * 3600, cloud, lambda: users_of(asked.nodes, own, asked.port))
    while True:
        watch.step()
        time.sleep(asked.every)


if __name__ == "__main__":
    main()
