"""A rank, as the process on its node that forked it sees it: its environment, its output, its end.

Output goes to logs/rank-N.log as it is, and line by line, marked `[N]`, to stdout, its events (training/run/events.py)
among it. That is the launcher's log on the head: a rank's last words are at hand even when its node is gone or its disk
is full.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import select
import signal
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from training.recipe.tables import NF4
from training.run.environment import env_on_node, parse_etc_environment
from training.run.events import MARK, PIPE, Ended, Started, line_of, unmistakable
from training.run.folder import RECIPE
from training.run.launch import Launch
from training.text.hidden import VARIABLE
from training.text.problems import FINISHED, STOPPED

NODE_FILE = Path("/etc/spotune/node.json")
_ETC_ENVIRONMENT = Path("/etc/environment")
_PR_SET_PDEATHSIG = 1
_HEADROOM = 200
"""The ranks' OOM score: the kernel then kills a rank rather than sshd or the supervisor."""
_VMSTAT = Path("/proc/vmstat")
PIPE_BYTES, READ_BYTES = 1 << 20, 1 << 16
"""At most so much waits in a pipe; and is taken from it at once."""


def environment_of(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank on a node that has `environ`; on this machine that is the user's own, and stays."""
    env = {**environ, **launch.env} if launch.here else env_on_node(launch.env, environ)
    recipe = Path(launch.run_dir) / RECIPE
    if recipe.exists() and tomllib.loads(recipe.read_text(encoding="utf-8")).get("base_precision") != NF4:
        env[VARIABLE] = "bitsandbytes"  # PEFT would import it, which takes a second or two
    if not NODE_FILE.exists():
        return env
    # gloo takes its interface from the environment only; the deploy found it and wrote it down
    return {"GLOO_SOCKET_IFNAME": json.loads(NODE_FILE.read_text(encoding="utf-8"))["interface"], **env}


def of_login() -> dict[str, str]:
    """What a login on this node has, however this program was started: its user's, and what /etc/environment sets."""
    user = pwd.getpwuid(os.getuid())
    try:
        settings = parse_etc_environment(_ETC_ENVIRONMENT.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        settings = {}
    names = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
    return {"LANG": "C.UTF-8", **settings, **names}


def oom_kills(vmstat: str) -> int:
    """How often the kernel has killed for lack of memory, from the text of /proc/vmstat."""
    return next((int(line.split()[1]) for line in vmstat.splitlines() if line.startswith("oom_kill ")), 0)


class Output:
    """A rank's output on its two ways; either may break without the rank noticing."""

    def __init__(self, rank: int, log: Path) -> None:
        self._mark = f"[{rank}] ".encode()
        self._rest = self._events = b""
        self._log: IO[bytes] | None = None
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("ab", buffering=0)
        except OSError as error:
            self.say(f"no log file: {error}")

    def say(self, text: str) -> None:
        """A line of our own, for the head only."""
        self._to_head(self._mark + text.encode() + b"\n")

    def take(self, data: bytes) -> None:
        """Some bytes of the program's output."""
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:
                self._log = None
                self.say(f"log file: {error}")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._to_head(self._mark + unmistakable(line[-4000:]) + b"\n")

    def take_events(self, data: bytes) -> None:
        """Some bytes of what the program tells in values, for the head only."""
        *lines, self._events = (self._events + data).split(b"\n")
        for line in lines:
            self._to_head(self._mark + MARK.encode() + line + b"\n")

    def end(self) -> None:
        """What was left without a newline."""
        if self._rest:
            self.take(b"\n")

    def _to_head(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:  # a signal may interrupt a long one
                rest = rest[os.write(sys.stdout.fileno(), rest) :]
        except OSError:  # the head is gone; the rank's own watchdog deals with that
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())


class RankProcess:
    """A rank that was forked."""

    exit_code: int | None = None
    """Once it has ended; negative where a signal ended it."""

    def __init__(self, rank: int, pid: int, log: Path, words: int, events: int) -> None:
        """`words` and `events`: descriptors to read what it says, for people and in values."""
        self._pid = pid
        self._output = Output(rank, log)
        self._takers = {words: self._output.take, events: self._output.take_events}
        self._kills_before = oom_kills(_VMSTAT.read_text(encoding="ascii"))
        self._output.say(line_of(Started(pid)))

    @property
    def sources(self) -> list[int]:
        """Where it may have said something."""
        return [*self._takers]

    def pass_on(self, source: int) -> bool:
        """Some of what it has said there; False where nothing more will come."""
        if data := os.read(source, READ_BYTES):
            self._takers[source](data)
            return True
        os.close(source)
        del self._takers[source]
        return False

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._pid:
                os.kill(self._pid, number)

    def look(self) -> None:
        """Tell its end once it has ended, after its last words. Its own children may hold the pipes open, and are not
        waited for."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            return
        self._pid = 0
        for source in self.sources:
            for _ in range(PIPE_BYTES // READ_BYTES + 1):  # its children may write for ever
                if not select.select([source], [], [], 0)[0] or not self.pass_on(source):
                    break
        self._output.end()
        self.close()
        self.exit_code = os.waitstatus_to_exitcode(status)
        killed = self.exit_code == -signal.SIGKILL
        oom = killed and oom_kills(_VMSTAT.read_text(encoding="ascii")) > self._kills_before
        self._output.say(line_of(Ended(self.exit_code, oom)))

    def close(self) -> None:
        """What it says is read no more."""
        for source in self.sources:
            os.close(source)
        self._takers = {}


def fork_rank(rank: int, run_dir: Path) -> RankProcess | None:
    """Fork. Gives the rank's process; None in the rank itself, which dies with the process that forked it."""
    pipes, parent = (os.pipe(), os.pipe()), os.getpid()
    if pid := os.fork():
        for _, write_end in pipes:
            os.close(write_end)
        return RankProcess(rank, pid, run_dir / "logs" / f"rank-{rank}.log", pipes[0][0], pipes[1][0])
    (words_read, words), (events_read, events) = pipes
    devnull = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((devnull, 0), (words, 1), (words, 2)):
        os.dup2(source, target)
    for each in (words_read, events_read, devnull, words):
        os.close(each)
    os.set_inheritable(events, True)
    os.environ[PIPE] = str(events)
    _be_rank(parent)
    return None


def die_with(parent: int) -> None:
    """The kernel is to end this process with the one that forked it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which is gone already
        os._exit(1)


def _be_rank(parent: int) -> None:
    """It ends with its parent, and as the first where memory is short."""
    die_with(parent)
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_HEADROOM), encoding="ascii")
    except OSError:
        print("cannot raise the OOM score of this rank", file=sys.stderr)


def launcher_code(code: int) -> int:
    """What to tell the launcher: at a non-zero code it ends the node's other ranks at once, so a rank that left on
    request must not look like a failure while its neighbour still saves."""
    if code in {FINISHED, STOPPED}:
        return 0
    return code if code > 0 else 128 - code


def watch(ranks: Sequence[RankProcess], attached: int | None = None) -> list[int]:
    """Pass on what ranks say until all have ended; gives their exit codes. SIGTERM and SIGINT go to them; at the end of
    the descriptor `attached` they are killed."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: _send(ranks, number))
    while True:
        for each in ranks:
            if each.exit_code is None:
                each.look()
        codes = [each.exit_code for each in ranks if each.exit_code is not None]
        if len(codes) == len(ranks):
            return codes
        of_rank = {source: each for each in ranks for source in each.sources}
        for source in select.select([*of_rank, woken, *([] if attached is None else [attached])], [], [])[0]:
            if source in of_rank:
                of_rank[source].pass_on(source)
            elif not os.read(source, READ_BYTES):
                attached = None
                _send(ranks, signal.SIGKILL)


def _send(ranks: Sequence[RankProcess], number: int) -> None:
    for each in ranks:
        each.send_signal(number)
