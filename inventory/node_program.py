"""Programs on a node, or on this machine, talked with while they run. They end when their input does.

So nothing is left behind by Ctrl-C, a closed laptop or a lost network. What a program is to know comes as arguments and
as lines of its input, never as text of a shell; secrets only by its input.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import paramiko
from paramiko.channel import ChannelFile, ChannelStdinFile

from inventory import ssh
from inventory.errors import USER_MISTAKE, InventoryError
from inventory.nodes import Node
from inventory.shown import shown
from training.text.files import Frame, bounded_json

LAST_WORDS = 5
LEAVE_S = 10.0
OPEN_S = 20.0
LONGEST_LINE, LONGEST_GREETING = 8 << 20, 1 << 16
"""Characters of one line that a program says; of what the shell says before it, whose end is kept."""


class ProgramError(ssh.SshError):
    """A program ended badly, or the connection to it did; the message has its last words."""


class ProgramRefused(InventoryError, ValueError):
    """What was asked cannot be done; the program's own sentence."""

    exit_code = USER_MISTAKE


def argv(source: Path, *arguments: str, python: str = "python3") -> list[str]:
    """The command line of a file of ours that needs nothing but Python: it is sent along, and nothing of it stays."""
    return [python, "-c", source.read_text(encoding="utf-8"), *arguments]


def run(connection: Any, source: Path, *arguments: str, timeout_s: float = ssh.RUN_TIMEOUT_S) -> str:
    """What such a program prints, run as root over an open connection. Raises SshError."""
    return ssh.run(connection, shlex.join(argv(source, *arguments)), timeout_s=timeout_s)


def ask(node: Node, source: Path, *arguments: str, timeout_s: float = ssh.ASK_TIMEOUT_S) -> str:
    """`run` over a connection of its own."""
    with ssh.connect(node) as connection:
        return run(connection, source, *arguments, timeout_s=timeout_s)


class Program:
    """One that runs. `end` waits for it and gives its exit code; `drop` lets go of it; `alive` says whether it runs and
    can be reached."""

    def __init__(
        self,
        where: str,
        reader: Iterable[str],
        writer: IO[Any],
        *,
        end: Callable[[], int],
        drop: Callable[[], None],
        alive: Callable[[], bool],
    ) -> None:
        self.where, self.alive = where, alive
        self._reader, self._writer, self._end, self._drop = reader, writer, end, drop

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        """Its input ends, and so does it."""
        with contextlib.suppress(OSError, EOFError):
            self._writer.close()
        self._drop()

    def send(self, message: Any) -> None:
        """A line to the program."""
        try:
            self._writer.write(json.dumps(message) + "\n")
            self._writer.flush()
        except (OSError, ValueError) as error:  # closed at the other end, or at this one
            raise ProgramError(f"{self.where}: the program does not listen any more: {error}") from error

    def lines(self) -> Iterator[str]:
        """What it says, line by line. Raises ProgramError where the connection breaks."""
        try:
            for line in self._reader:
                if len(line) > LONGEST_LINE:
                    self._drop()
                    what = f"a line of it has more than {LONGEST_LINE} characters"
                    raise ProgramError(f"{self.where}: the program was ended: {what}")
                yield line
        except (EOFError, OSError) as error:
            raise ProgramError(f"{self.where}: the connection broke: {error or type(error).__name__}") from error

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it tells in JSON, until it ends; a note goes to stderr. Raises ProgramRefused for its mistake,
        ProgramError where it failed."""
        words: deque[str] = deque(maxlen=LAST_WORDS)
        for line in self.lines():
            message = _message(line)
            if message is None:
                words.append(line.strip())
                continue
            if "mistake" in message:
                raise ProgramRefused(message["mistake"])
            if "note" in message:
                print(shown(str(message["note"])), file=sys.stderr)
                continue
            yield message
        self._ended(words)

    def answer(self) -> dict[str, Any]:
        """The last of `messages`, once it has ended. Raises what that does, and ProgramError where there was none."""
        if last := deque(self.messages(), maxlen=1):
            return last[0]
        raise ProgramError(f"{self.where}: the program ended without an answer")

    def _ended(self, words: Sequence[str]) -> None:
        try:
            code = self._end()
        except (EOFError, OSError) as error:
            raise ProgramError(f"{self.where}: the connection broke: {error or type(error).__name__}") from error
        if code:  # -1 where the connection went first
            output = [word.strip() for word in words if word.strip()]
            last = output[-1] if output else "it said nothing"
            raise ProgramError(f"{self.where}: the program ended with {code}: {last}")


@contextlib.contextmanager
def started(node: Node, source: Path, question: object) -> Iterator[Program]:
    """Inside the `with`, a file of ours runs on a node as root, over a connection of its own; its argument is
    `question` as JSON. Raises SshError."""
    command = shlex.join(argv(source, json.dumps(question)))
    with ssh.connect(node) as connection, start(connection, command, node.name) as program:
        yield program


class _Output(ChannelFile):
    """paramiko's own flushes where it is collected: a traceback to stderr where its buffer was collected first."""

    def __del__(self) -> None:
        """Nothing is left to write."""


class _Input(ChannelStdinFile):
    """The same; whoever opened it closes it."""

    def __del__(self) -> None:
        """Nothing is left to write."""


def start(connection: Any, command: str, where: str, *, as_root: bool = True) -> Program:
    """Start a shell command over an open connection. Raises ProgramError where it cannot be started."""
    try:
        channel = connection.transport.open_session(timeout=OPEN_S)
        channel.set_combine_stderr(True)  # what the shell or sudo itself has to say
        frame = Frame()
        # as two streams, sshd may send a warning in the middle of a message
        one_stream = f"exec 2>&1; {frame.opening}{command}"
        channel.exec_command(ssh.root_line(connection, one_stream) if as_root else one_stream)
    except (paramiko.SSHException, OSError, EOFError) as error:
        reason = ssh.channel_error(error) or type(error).__name__
        raise ProgramError(f"{where}: no program can be started there: {reason}") from error
    output = _Output(channel, "rb")
    return Program(
        where,
        _behind(
            frame.mark,
            (line.decode("utf-8", errors="replace") for line in iter(lambda: output.readline(LONGEST_LINE + 1), b"")),
        ),
        cast("IO[Any]", _Input(channel, "wb")),
        end=channel.recv_exit_status,
        drop=channel.close,
        alive=lambda: not channel.exit_status_ready() and channel.get_transport().is_active(),
    )


def _behind(mark: str, lines: Iterator[str]) -> Iterator[str]:
    """What the program says, without what the shell said before it; all of that where no program was started."""
    greeting = ""
    for line in lines:
        if line.rstrip("\r\n") == mark:
            yield from lines
            return
        greeting = (greeting + line)[-LONGEST_GREETING:]
    yield from greeting.splitlines(keepends=True)


def start_here(command: str) -> Program:
    """Start a shell command on this machine; in a session of its own, so that Ctrl-C reaches this side alone."""
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

    reader, writer = iter(lambda: child.stdout.readline(LONGEST_LINE + 1) if child.stdout else "", ""), child.stdin
    return Program("this machine", reader, writer, end=child.wait, drop=drop, alive=lambda: child.poll() is None)


def _message(line: str) -> dict[str, Any] | None:
    """The object that a line is; None where it is words, whatever they begin with."""
    try:
        content = bounded_json(line) if line.startswith("{") else None
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
