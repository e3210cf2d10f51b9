"""A program on a head, talked with while it runs: JSON lines both ways. It ends when its input does.

So nothing is left behind by Ctrl-C, a closed laptop or a lost network: the program sees its input end.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from training.errors import TrainingError
from training.exit_codes import UNUSABLE

LAST_WORDS = 5
LEAVE_S = 10.0


class TalkBroken(TrainingError, RuntimeError):
    """The program ended badly, or the connection to it; the message has its last words."""


class TalkRefused(TrainingError, ValueError):
    """What was asked cannot be done; the program's own sentence."""

    exit_code = UNUSABLE


class Talk:
    """An open conversation. `end` waits for the program and gives its exit code; `drop` lets go of it; `alive` says
    whether it runs and can be reached."""

    def __init__(
        self,
        reader: Iterable[str],
        writer: IO[Any],
        end: Callable[[], int],
        drop: Callable[[], None],
        alive: Callable[[], bool],
    ) -> None:
        self._reader, self._writer, self._end, self._drop, self.alive = reader, writer, end, drop, alive

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Any) -> None:
        """A line to the program."""
        try:
            self._writer.write(json.dumps(message) + "\n")
            self._writer.flush()
        except (OSError, ValueError) as error:  # closed at the other end, or at this one
            raise TalkBroken(f"the program does not listen any more: {error}") from error

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it tells, until it ends. Raises TalkRefused for its mistake, TalkBroken where it failed."""
        words: deque[str] = deque(maxlen=LAST_WORDS)
        try:
            for line in self._reader:
                if not line.startswith("{"):
                    words.append(line.strip())
                    continue
                message = json.loads(line)
                if "mistake" in message:
                    raise TalkRefused(message["mistake"])
                yield message
            code = self._end()
        except (EOFError, OSError) as error:
            raise TalkBroken(f"the connection broke: {error or type(error).__name__}") from error
        if code != 0:
            said = next((word for word in reversed(words) if word), "it said nothing")
            raise TalkBroken(f"the program on the head ended with {code}: {said}")

    def lines(self) -> Iterator[str]:
        """What a program says that tells no JSON, line by line. Raises TalkBroken where the connection breaks."""
        try:
            yield from (line.strip() for line in self._reader)
        except (EOFError, OSError) as error:
            raise TalkBroken(f"the connection broke: {error or type(error).__name__}") from error

    def last_words(self) -> str:
        """All that it says, once it has ended. Raises TalkBroken where it failed or the connection did."""
        try:
            said = "".join(self._reader)
            code = self._end()
        except (EOFError, OSError) as error:
            raise TalkBroken(f"the connection broke: {error or type(error).__name__}") from error
        if code != 0:
            raise TalkBroken(f"the program on the head ended with {code}, or the connection to it did")
        return said

    def close(self) -> None:
        """Its input ends, and so does it."""
        with contextlib.suppress(OSError, EOFError):
            self._writer.close()
        self._drop()


def talk_here(command: str) -> Talk:
    """With a program of this machine; in a session of its own, so that Ctrl-C reaches this side alone."""
    child = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    assert child.stdin is not None and child.stdout is not None

    def drop() -> None:
        try:
            child.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout:
            child.stdout.close()

    return Talk(child.stdout, child.stdin, child.wait, drop, lambda: child.poll() is None)


def talk_over(channel: Any, command: str) -> Talk:
    """With a program at the other end of an ssh channel (paramiko's)."""
    channel.set_combine_stderr(True)
    channel.exec_command(command)
    lines = (line.decode("utf-8", errors="replace") for line in channel.makefile("rb"))

    def alive() -> bool:
        return not channel.exit_status_ready() and channel.get_transport().is_active()

    return Talk(lines, channel.makefile_stdin("wb"), channel.recv_exit_status, channel.close, alive)
