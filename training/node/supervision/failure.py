"""Why a run ended: the launcher's lines in, one verdict out. Pure.

When one rank dies the others follow within seconds, with errors about lost connections. The verdict names the
cause, not the first or the loudest of its consequences.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from training.node.diagnosis.xid import Xid
from training.run import causes
from training.run.causes import NONE, OF_CODE, Cause, CauseKind
from training.run.events import Ended, Event, Failed, Started, Told, parse_line
from training.run.folder import State
from training.run.launch import Launch
from training.text.problems import FINISHED, PEER_LOST, SPOKEN, STOPPED

LAST_LINES = 30
HEARD_LINES = 300
"""Of each rank: NCCL's watchdog follows its one telling line with a page of stack frames, several times over."""
WIDTH = 300
"""Characters of a quoted line."""
SECONDARY = 6
"""Symptoms from this weight on are mostly consequences of something not seen yet: worth a wait."""

_HOST = re.compile(r"^(?P<host>[A-Za-z0-9][\w.-]*): ?(?P<text>.*)$")
_RANK = re.compile(r"^\[(?P<rank>\d+)\] (?P<text>.*)$")
_KNOWN: dict[CauseKind, tuple[int, str]] = {
    "disk_full": (3, "could not write: the disk is full; free space (fab runs.delete), then fab train --resume"),
    "disk_read_only": (
        3,
        "could not write: its disk is read-only; the kernel makes it so after errors: dmesg says which",
    ),
    "out_of_gpu_memory": (4, "ran out of GPU memory; a smaller micro_batch or max_length needs less"),
    "out_of_memory": (4, "ran out of memory"),
    "gpu_failed": (4, "failed on its GPU: {words}"),
    "peer_lost": (7, "lost its connection to the others: {line}"),
    "diverged": (5, "ended with code {code}: {line}"),
}
"""Weight and sentence where a rank that ended by itself said what it was, or its libraries did."""
_CRASHED = (4, "ended with an error of CUDA: {words}")
ASKED = {
    True: "stopped on request, after saving a checkpoint",
    False: "stopped on request; the ranks did not save in time, the last checkpoint stands",
}
"""Why a run ended that was asked to stop, by whether it saved, for people."""
STOPPING = "stopping: saving a checkpoint"
"""What such a run says of itself until it has ended."""
SSH_LOST_CODE = 255
GOOD_ENDS = {FINISHED, STOPPED}


@dataclass(frozen=True)
class Symptom:
    """One thing that went wrong; the lowest weight is the likeliest origin of the others."""

    weight: int
    reason: str
    cause: Cause
    node: str | None = None
    rank: int | None = None


@dataclass
class Observation:
    """What the launcher's output, and the supervisor's own looks at the nodes, have told so far."""

    launch: Launch
    started: dict[int, int] = field(default_factory=dict)
    """Each rank's pid on its node."""
    ended: dict[int, Ended] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    """Why ranks said that they end."""
    lost_nodes: list[str] = field(default_factory=list)
    node_codes: dict[str, int] = field(default_factory=dict)
    rank_lines: dict[int, deque[str]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=HEARD_LINES)))
    hung: Symptom | None = None
    """Who fell behind, where the run stopped to progress."""
    xids: dict[str, list[Xid]] = field(default_factory=dict)
    """What the driver said of each node's GPUs since the run started."""
    node_lines: dict[str, deque[str]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=LAST_LINES)))

    def take(self, line: str) -> Told | None:
        """One line of the launcher's output; gives the event in it."""
        if ended := causes.ssh_end(line):
            self.node_codes[ended[0]] = ended[1]
            return None
        host, alone = self.launch.hosts[0].name, self.launch.here or len(self.launch.hosts) == 1
        if not alone and (match := _HOST.match(line)) and match["host"] in {each.name for each in self.launch.hosts}:
            host, line = match["host"], match["text"]
        match = _RANK.match(line)
        if match is None:
            self.node_lines[host].append(line)
            if causes.SSH_LOST.match(line):
                words = line.split()
                named = (each.name for each in self.launch.hosts if {each.name, each.private_address} & {*words})
                self.lose(next(named, host))
            return None
        rank, text = int(match["rank"]), match["text"]
        if event := parse_line(text):
            self._take_event(rank, event)
            return Told(rank, event)
        self.rank_lines[rank].append(text)
        return None

    def _take_event(self, rank: int, event: Event) -> None:
        if isinstance(event, Started):
            self.started[rank] = event.pid
        elif isinstance(event, Ended):
            self.ended.setdefault(rank, event)
        elif isinstance(event, Failed):
            self.failed.setdefault(rank, event)

    def lose(self, node: str) -> None:
        """A node no longer answers."""
        if node not in self.lost_nodes:
            self.lost_nodes.append(node)

    @property
    def silent_nodes(self) -> list[str]:
        """Those that no longer answer, or to which ssh lost its connection."""
        cut = [name for name, code in self.node_codes.items() if code == SSH_LOST_CODE]
        return list(dict.fromkeys((*self.lost_nodes, *cut)))

    @property
    def all_ended(self) -> bool:
        """Whether every rank has said how it ended."""
        return len(self.ended) == self.launch.world_size

    @property
    def silent_peer(self) -> dict[int, int]:
        """The pid of the rank that the others left because of, by its number: it still stands there and says nothing.
        Empty where something else is likelier, or where none is."""
        first = next(iter(self.symptoms()), None)
        if first is None or first.cause.kind != "peer_lost" or first.cause.peer in {None, *self.ended}:
            return {}
        return {rank: pid for rank, pid in self.started.items() if rank == first.cause.peer}

    def symptoms(self) -> list[Symptom]:
        """Everything that went wrong so far, the likeliest origin first."""
        hung = [self.hung] if self.hung else []
        symptoms = [*hung, *self._of_nodes(), *self._of_gpus(), *self._of_ranks()]
        return sorted(symptoms, key=lambda symptom: symptom.weight)

    def _of_nodes(self) -> Iterable[Symptom]:
        others = [host.name for host in self.launch.hosts[1:]]
        lost, gone = self.silent_nodes, Cause("node_lost")
        if len(others) > 1 and set(others) <= set(lost):
            yield Symptom(1, "the head lost all other nodes at once: look at its own network first", gone, others[0])
        else:
            for name in lost:
                reason = f"node {name} was lost: it no longer answers the head{self.words_of(name)}"
                yield Symptom(1, reason, gone, name)
        failed_on = {self.launch.host_of(rank).name for rank, end in self.ended.items() if end.code not in GOOD_ENDS}
        for name, code in self.node_codes.items():
            if code not in {SSH_LOST_CODE, 0} and name not in failed_on:
                yield Symptom(
                    5, f"the launcher on {name} {_end_of(code)}{self.words_of(name)}", _not_launched(code), name
                )

    def words_of(self, name: str) -> str:
        """The last that a node's launcher said, in brackets; without DeepSpeed's chatter and mpirun's frames."""
        words = [line.strip() for line in self.node_lines[name] if line.strip(" -") and "[INFO]" not in line]
        said = next((word for word in words if word.startswith("ssh: ")), words[-1] if words else "")
        return f" ({said})" if said else ""

    def _of_ranks(self) -> Iterable[Symptom]:
        for rank, end in self.ended.items():
            if end.code in GOOD_ENDS:
                continue
            node = self.launch.host_of(rank).name
            weight, cause, words = rank_end(end, self.failed.get(rank), list(self.rank_lines[rank]))
            peer = cause.peer  # because of which it left
            about = rank if peer is None or peer not in range(self.launch.world_size) else peer
            yield Symptom(weight, f"rank {rank} on {node} {words}", cause, self.launch.host_of(about).name, about)

    def _of_gpus(self) -> Iterable[Symptom]:
        for node, xids in self.xids.items():
            if broken := [xid for xid in xids if xid.of_hardware]:
                reason = f"a GPU of {node} failed: {broken[-1].text}; take this machine out of the cluster"
                yield Symptom(1, reason, Cause("gpu_failed", xid=broken[-1].number), node)

    def last_lines(self, symptom: Symptom) -> tuple[str, ...]:
        """The last words of what failed: the rank's, else its node's launcher's."""
        if symptom.rank is not None:
            return tuple(self.rank_lines[symptom.rank])[-LAST_LINES:]
        lines = self.node_lines[symptom.node] if symptom.node else deque()
        return tuple(lines)


def rank_end(end: Ended, failed: Failed | None, lines: list[str]) -> tuple[int, Cause, str]:
    """How likely a rank's end is the origin (0: surely), what it was, and in words.

    What the rank itself told (`failed`) goes before what its libraries said in its last lines.
    """
    if end.oom:
        return 0, Cause("out_of_memory"), "was killed by the kernel: the node ran out of memory"
    if end.code == -signal.SIGTERM:
        return 8, Cause("killed", signal=-end.code), "was ended by signal 15 (SIGTERM)"
    if end.code < 0 and end.code != -signal.SIGABRT:
        return 2, Cause("killed", signal=-end.code), f"was killed by signal {-end.code} ({_signal_name(-end.code)})"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "without a word")
    reason = failed.reason if failed else last
    if end.code == PEER_LOST:
        weight = 8 if failed and failed.follows else SECONDARY
        return weight, Cause("peer_lost", peer=failed.peer if failed else None), f"left by itself: {reason}"
    if end.code in SPOKEN:
        return 3, Cause(OF_CODE[end.code]), f"could not go on: {reason}"
    return _broke(end.code, failed, reason, lines)


def _broke(code: int, failed: Failed | None, reason: str, lines: list[str]) -> tuple[int, Cause, str]:
    """The end of a rank that says no more by its code: an error nobody foresaw, or an assertion of some library."""

    def cause(kind: CauseKind) -> Cause:
        return Cause(kind, code=code) if code > 0 else Cause(kind, signal=-code)

    telling = causes.telling(lines)
    if failed and failed.cause in _KNOWN:
        weight, words = _KNOWN[failed.cause]
        meant = causes.meaning(telling)
        _, phrase, line = meant if meant and meant[0] == failed.cause else (None, reason, reason)
        return weight, cause(failed.cause), words.format(words=phrase[:WIDTH], line=line[:WIDTH], code=code)
    if code > 0:
        telling = telling[-LAST_LINES:]
    if code > 0 and not telling and not failed:
        return SECONDARY, cause("crashed"), f"ended with code {code} without a word"
    if meant := causes.meaning(telling):
        kind, phrase, line = meant
        weight, words = _KNOWN.get(kind, _CRASHED)
        return weight, cause(kind), words.format(words=phrase[:WIDTH], line=line[:WIDTH])
    if code < 0:
        words = f"was killed by signal {-code} ({_signal_name(-code)})"
        return 2, cause("killed"), f"{words}: {reason[:WIDTH]}" if telling else words
    return 5, cause("crashed"), f"ended with code {code}: {reason}"


def _of_signal(code: int) -> int:
    """The signal that ended a program, by its exit code or by that of the shell it ran in; 0: none."""
    return -code if code < 0 else max(0, code - 128)


def _end_of(code: int) -> str:
    number = _of_signal(code)
    return f"was killed by signal {number} ({_signal_name(number)})" if number else f"ended with code {code}"


def _not_launched(code: int) -> Cause:
    number = _of_signal(code)
    return Cause("not_launched", signal=number) if number else Cause("not_launched", code=code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


@dataclass(frozen=True)
class Verdict:
    """How a run ended."""

    state: State
    reason: str = ""
    cause: Cause = NONE
    rank: int | None = None
    node: str | None = None
    last_lines: tuple[str, ...] = ()


def verdict(seen: Observation, stop_requested: bool, launcher_code: int | None) -> Verdict:
    """The run's end, from what its ranks said: the launcher's exit code can be 0 after a failure, since
    DeepSpeed's runner passes on only positive codes and pdsh may have died of a signal."""
    symptoms = seen.symptoms()
    codes = {end.code for end in seen.ended.values()}
    if seen.all_ended and codes == {0}:
        return Verdict("finished")
    if seen.all_ended and codes <= GOOD_ENDS:
        return Verdict("stopped", ASKED[True], Cause("asked", saved=True))
    if stop_requested:
        return Verdict("stopped", ASKED[False], Cause("asked", saved=False))
    symptom = symptoms[0] if symptoms else _unheard(seen, launcher_code)
    reason = symptom.reason
    xids = seen.xids.get(symptom.node or "", [])
    if xids and (symptom.cause.xid is None or symptom.cause.xid != xids[-1].number):
        reason += f"; its driver says: {xids[-1].text}"
    return Verdict("failed", reason, symptom.cause, symptom.rank, symptom.node, seen.last_lines(symptom))


def _unheard(seen: Observation, launcher_code: int | None) -> Symptom:
    """Of a run whose launcher is gone, or stays, without a word of what went wrong."""
    rank = next((rank for rank in range(seen.launch.world_size) if rank not in seen.ended), None)
    node = seen.launch.host_of(rank).name if rank is not None else None
    end = "still runs" if launcher_code is None else f"ended with code {launcher_code}"
    reason = f"rank {rank} on {node} was not heard to end although the launcher {end}"
    if launcher_code and not seen.started:
        head = seen.launch.hosts[0].name
        return Symptom(9, f"the launcher {end}{seen.words_of(head)}", _not_launched(launcher_code), head)
    return Symptom(9, reason, Cause("unheard", code=launcher_code), node, rank)
