"""Why a run ended: the launcher's lines in, one verdict out. Pure.

When one rank dies the others follow within seconds, with errors about lost connections. The verdict names the
cause, not the first or the loudest of its consequences.
"""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from training import lost_peer
from training.diagnosis import xid
from training.exit_codes import FINISHED, MISTAKES, PEER_LOST, SPOKEN, STOPPED
from training.launch import Launch
from training.run_folder import State
from training.supervision.rank_start import ENDED, STARTED

LAST_LINES = 30
HEARD_LINES = 300
"""Of each rank: NCCL's watchdog follows its one telling line with a page of stack frames, several times over."""
WIDTH = 300
"""Characters of a quoted line."""
SECONDARY = 6
"""Causes from this weight on are mostly consequences of something not seen yet: worth a wait."""

_HOST = re.compile(r"^(?P<host>[A-Za-z0-9][\w.-]*): ?(?P<text>.*)$")
_RANK = re.compile(r"^\[(?P<rank>\d+)\] (?P<text>.*)$")
_SSH_ENDED = re.compile(r"^pdsh@\S+: (?P<host>\S+): ssh exited with exit code (?P<code>\d+)")
_SAID: tuple[tuple[re.Pattern[str], int, str], ...] = (
    (
        re.compile(r"No space left on device|Errno 28\b|ENOSPC|Disk quota exceeded", re.IGNORECASE),
        3,
        "could not write: the disk is full; delete old runs in /data/runs, then resume",
    ),
    (
        re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"),
        4,
        "ran out of GPU memory; a smaller micro_batch or max_length needs less",
    ),
    (
        re.compile(r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (not enough|can't)|bad_alloc"),
        4,
        "ran out of memory",
    ),
    (
        re.compile(r"CUDA error: (?!out of memory).*|CUBLAS_STATUS_(?!ALLOC)\w+|uncorrectable (ECC|NVLink) error.*"),
        4,
        "failed on its GPU: {found}",
    ),
    (lost_peer.WORDS, 7, "lost its connection to the others: {line}"),
)
"""What the words of a rank that ended by itself mean: pattern, weight, words; the first that matches."""
_CHATTER = re.compile(r"^frame #\d+:| NCCL INFO ")
_SSH_LOST = re.compile(r"Timeout, server \S+ not responding|client_loop: send disconnect|Connection to \S+ closed by")
"""ssh's own words; pdsh passes its exit code on only once all output has ended."""
SSH_LOST_CODE = 255
SAVED = "stopped on request, after saving a checkpoint"
_OWN_NAME = re.compile(r"^(rank \d+ \([^)]*\): )+")


@dataclass(frozen=True)
class Cause:
    """One thing that went wrong; the lowest weight is the likeliest origin of the others."""

    weight: int
    reason: str
    node: str | None = None
    rank: int | None = None
    mistake: bool = False
    """Of the user: recipe, data, base model or checkpoint cannot be used."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank's program ended: its exit code, negative for a signal."""

    code: int
    oom: bool


@dataclass
class Observation:
    """What the launcher's output, and the supervisor's own looks at the nodes, have told so far."""

    launch: Launch
    started: dict[int, int] = field(default_factory=dict)
    """Each rank's pid on its node."""
    ended: dict[int, RankEnd] = field(default_factory=dict)
    lost_nodes: list[str] = field(default_factory=list)
    node_codes: dict[str, int] = field(default_factory=dict)
    rank_lines: dict[int, deque[str]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=HEARD_LINES)))
    hung: Cause | None = None
    """Who fell behind, where the run stopped to progress."""
    xids: dict[str, list[str]] = field(default_factory=dict)
    """What the driver said of each node's GPUs since the run started."""
    node_lines: dict[str, deque[str]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=LAST_LINES)))

    def take(self, line: str) -> None:
        """One line of the launcher's output."""
        if match := _SSH_ENDED.match(line):
            self.node_codes[match["host"]] = int(match["code"])
            return
        host = self.launch.hosts[0].name
        if not self._alone and (match := _HOST.match(line)):
            host, line = match["host"], match["text"]
        rank = _RANK.match(line)
        if rank is None:
            self.node_lines[host].append(line)
            if _SSH_LOST.match(line):
                self.lose(host)
            return
        self._take_rank(int(rank["rank"]), rank["text"])

    def _take_rank(self, rank: int, text: str) -> None:
        if text.startswith(STARTED + " "):
            self.started[rank] = json.loads(text.removeprefix(STARTED))["pid"]
        elif text.startswith(ENDED + " "):
            end = json.loads(text.removeprefix(ENDED))
            self.ended.setdefault(rank, RankEnd(end["code"], end["oom"]))
        else:
            self.rank_lines[rank].append(text)

    def lose(self, node: str) -> None:
        """A node no longer answers."""
        if node not in self.lost_nodes:
            self.lost_nodes.append(node)

    @property
    def _alone(self) -> bool:
        return self.launch.here or len(self.launch.hosts) == 1

    @property
    def all_ended(self) -> bool:
        """Whether every rank has said how it ended."""
        return len(self.ended) == self.launch.world_size

    def causes(self) -> list[Cause]:
        """Everything that went wrong so far, the likeliest origin first."""
        hung = [self.hung] if self.hung else []
        return sorted(
            [*hung, *self._node_causes(), *self._gpu_causes(), *self._rank_causes()], key=lambda cause: cause.weight
        )

    def _node_causes(self) -> Iterable[Cause]:
        others = [host.name for host in self.launch.hosts[1:]]
        lost = list(self.lost_nodes)
        lost += [n for n, code in self.node_codes.items() if code == SSH_LOST_CODE and n not in lost]
        if len(others) > 1 and set(others) <= set(lost):
            yield Cause(1, "the head lost all other nodes at once: look at its own network first", others[0])
        else:
            for name in lost:
                yield Cause(1, f"node {name} was lost: it no longer answers the head{self._ssh_words(name)}", name)
        for name, code in self.node_codes.items():
            if code not in {SSH_LOST_CODE, 0} and not self._rank_failed_on(name):
                yield Cause(5, f"the launcher on {name} ended with code {code}{self._ssh_words(name)}", name)

    def _ssh_words(self, name: str) -> str:
        words = [line for line in self.node_lines[name] if line.strip() and "[INFO]" not in line]
        return f" ({words[-1].strip()})" if words else ""

    def _rank_failed_on(self, name: str) -> bool:
        return any(
            end.code not in {FINISHED, STOPPED} and self.launch.host_of(rank).name == name
            for rank, end in self.ended.items()
        )

    def _rank_causes(self) -> Iterable[Cause]:
        for rank, end in self.ended.items():
            if end.code in {FINISHED, STOPPED}:
                continue
            node = self.launch.host_of(rank).name
            weight, words = rank_cause(end, list(self.rank_lines[rank]))
            yield Cause(weight, f"rank {rank} on {node} {words}", node, rank, end.code in MISTAKES)

    def _gpu_causes(self) -> Iterable[Cause]:
        for node, lines in self.xids.items():
            if broken := [line for line in lines if xid.of_hardware(line)]:
                yield Cause(1, f"a GPU of {node} failed: {broken[-1]}; take this machine out of the cluster", node)

    def last_lines(self, cause: Cause) -> tuple[str, ...]:
        """The last words of what failed: the rank's, else its node's launcher's."""
        if cause.rank is not None:
            return tuple(self.rank_lines[cause.rank])[-LAST_LINES:]
        lines = self.node_lines[cause.node] if cause.node else deque()
        return tuple(lines)


def rank_cause(end: RankEnd, lines: list[str]) -> tuple[int, str]:
    """How likely a rank's end is the origin (0: surely), and in words what it was."""
    if end.oom:
        return 0, "was killed by the kernel: the node ran out of memory"
    if end.code == -signal.SIGTERM:
        return 8, "was ended by signal 15 (SIGTERM)"
    if end.code < 0 and end.code != -signal.SIGABRT:
        return 2, f"was killed by signal {-end.code} ({_signal_name(-end.code)})"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "without a word")
    if end.code == PEER_LOST:
        return (8 if "because of" in last else SECONDARY), f"left by itself: {_OWN_NAME.sub('', last)}"
    if end.code in SPOKEN:
        return 3, f"could not go on: {_OWN_NAME.sub('', last)}"
    lines = [line.strip() for line in lines if line.strip() and not _CHATTER.search(line)]
    if end.code > 0:
        lines = lines[-LAST_LINES:]
    if end.code > 0 and not lines:
        return SECONDARY, f"ended with code {end.code} without a word"
    for pattern, weight, words in _SAID:
        for line in lines:
            if match := pattern.search(line):
                return weight, words.format(found=match[0].strip()[:WIDTH], line=line[:WIDTH])
    if end.code < 0:  # by itself: an assertion of some library
        return 2, f"was killed by signal {-end.code} ({_signal_name(-end.code)}){f': {last[:WIDTH]}' if lines else ''}"
    return 5, f"ended with code {end.code}: {last}"


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
    rank: int | None = None
    node: str | None = None
    last_lines: tuple[str, ...] = ()
    mistake: bool = False


def verdict(seen: Observation, stop_requested: bool, launcher_code: int | None) -> Verdict:
    """The run's end, from what its ranks said: the launcher's exit code can be 0 after a failure, since
    DeepSpeed's runner passes on only positive codes and pdsh may have died of a signal."""
    causes = seen.causes()
    codes = {end.code for end in seen.ended.values()}
    if seen.all_ended and codes == {0}:
        return Verdict("finished")
    if seen.all_ended and codes <= {FINISHED, STOPPED}:
        return Verdict("stopped", SAVED)
    if stop_requested:
        return Verdict("stopped", "stopped on request; the ranks did not save in time, the last checkpoint stands")
    if not causes:
        silent = [rank for rank in range(seen.launch.world_size) if rank not in seen.ended]
        rank = silent[0] if silent else None
        node = seen.launch.host_of(rank).name if rank is not None else None
        end = "still runs" if launcher_code is None else f"ended with code {launcher_code}"
        causes = [Cause(9, f"rank {rank} on {node} was not heard to end although the launcher {end}", node, rank)]
    cause = causes[0]
    reason = cause.reason
    if (lines := seen.xids.get(cause.node or "", [])) and lines[-1] not in reason:
        reason += f"; its driver says: {lines[-1]}"
    return Verdict("failed", reason, cause.rank, cause.node, seen.last_lines(cause), cause.mistake)
