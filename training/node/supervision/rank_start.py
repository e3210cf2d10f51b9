"""What the launcher starts once per rank: it runs the real program, keeps its output, and says how it ended.

`python -m training.node.supervision.rank_start training.node.finetune --run DIR ...`

Output goes to logs/rank-N.log as it is, and line by line, marked `[N]`, to stdout, its events (training/run/events.py)
among it. Over pdsh that is the launcher's log on the head: a rank's last words are at hand even when its node is gone
or its disk is full.
DeepSpeed's launcher does not say which of a node's ranks died, nor of what; this does. It imports no torch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from training.recipe.tables import NF4
from training.run.events import MARK, PIPE, Ended, Started, line_of, unmistakable
from training.run.folder import LAUNCH, RECIPE
from training.run.launch import env_on_node, left_out, parse_launch
from training.text.hidden import VARIABLE
from training.text.problems import FINISHED, STOPPED

NODE_FILE = Path("/etc/spotune/node.json")
LINGER_S = 5.0
"""Before a failure is passed on: the launcher then ends this node's other ranks at once, and one of them may
be the cause and about to say so. The supervisor, which knows already, does not wait for this."""
_PR_SET_PDEATHSIG = 1
_HEADROOM = 200
"""Added to the ranks' OOM score: the kernel then kills a rank rather than sshd."""


def oom_kills(vmstat: str) -> int:
    """How often the kernel has killed for lack of memory, from the text of /proc/vmstat."""
    return next((int(line.split()[1]) for line in vmstat.splitlines() if line.startswith("oom_kill ")), 0)


def _in_child() -> None:
    # A rank must not outlive this process: the launcher knows only this one.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_HEADROOM), encoding="ascii")
    except OSError:
        print("cannot raise the OOM score of this rank", file=sys.stderr)


def environment_of(run_dir: Path) -> dict[str, str]:
    """A rank's environment. What else this node has is named once, by its first rank."""
    launch = parse_launch((run_dir / LAUNCH).read_text(encoding="utf-8"))
    env = env_on_node(launch, os.environ)
    if (dropped := left_out(launch, os.environ)) and os.environ["LOCAL_RANK"] == "0":
        print("of this node's environment its ranks do not get", *dropped, flush=True)
    recipe = run_dir / RECIPE
    if recipe.exists() and tomllib.loads(recipe.read_text(encoding="utf-8")).get("base_precision") != NF4:
        env[VARIABLE] = "bitsandbytes"  # PEFT would import it, which takes a second or two
    if not NODE_FILE.exists():
        return env
    # gloo takes its interface from the environment only; the deploy found it and wrote it down
    return {"GLOO_SOCKET_IFNAME": json.loads(NODE_FILE.read_text(encoding="utf-8"))["interface"], **env}


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
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except OSError:  # the head is gone; the rank's own watchdog deals with that
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())


def _copy(takers: dict[int, Callable[[bytes], None]], child: subprocess.Popen[bytes]) -> None:
    """What comes from each descriptor to its taker, until the program has ended. Its own children may hold the pipes
    open after it died, so don't wait for the end of the streams alone."""
    ended = False
    while takers:
        readable, _, _ = select.select(list(takers), [], [], 0.5)
        for source in readable:
            if data := os.read(source, 65536):
                takers[source](data)
            else:
                del takers[source]
        if ended and not readable:
            return
        ended = child.poll() is not None


def run(rank: int, argv: list[str], run_dir: Path, env: Mapping[str, str]) -> int:
    """Run a rank's program to its end and return its exit code, negative where a signal ended it."""
    output = Output(rank, run_dir / "logs" / f"rank-{rank}.log")
    before = oom_kills(Path("/proc/vmstat").read_text(encoding="ascii"))
    events, write_end = os.pipe()
    child = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**env, PIPE: str(write_end)},
        pass_fds=(write_end,),
        preexec_fn=_in_child,  # noqa: PLW1509 - there are no threads here
    )
    os.close(write_end)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: child.send_signal(number))
    output.say(line_of(Started(child.pid)))
    assert child.stdout is not None
    _copy({child.stdout.fileno(): output.take, events: output.take_events}, child)
    code = child.wait()
    output.end()
    killed = code == -signal.SIGKILL
    oom = killed and oom_kills(Path("/proc/vmstat").read_text(encoding="ascii")) > before
    output.say(line_of(Ended(code, oom)))
    return code


def launcher_code(code: int) -> int:
    """What to tell DeepSpeed's launcher: at a non-zero code it ends the node's other ranks at once, so a rank
    that left on request must not look like a failure while its neighbour still saves."""
    if code in {FINISHED, STOPPED}:
        return 0
    return code if code > 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--run", type=Path, required=True)
    arguments, others = parser.parse_known_args()
    env = environment_of(arguments.run)
    argv = [sys.executable, "-u", "-m", arguments.module, "--run", str(arguments.run), *others]
    code = launcher_code(run(int(os.environ["RANK"]), argv, arguments.run, env))
    if code != 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(LINGER_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
