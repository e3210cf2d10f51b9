"""The head as the laptop sees it: what it answers, files put and fetched.

The code in on_head/ is sent once a connection, then each question is a line, and so is its answer.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, get_type_hints

from paramiko import SFTPError, SSHException

from inventory import node_program, ssh
from inventory.node_program import Program, ProgramError
from inventory.nodes import Node
from training.laptop.on_head import fs, machines, run_folders, words
from training.laptop.on_head.run_folders import version_of
from training.run.folder import GO, REMOTE_RUNS, STATUS, STOP
from training.run.launch import NO_DATA_DISK, Launch, LaunchError, supervisor_argv, unit_argv
from training.text.files import SFTP_GARBAGE, bounded_json, fits, within
from training.text.problems import FAILED

if TYPE_CHECKING:
    from paramiko import SFTPClient


P = ParamSpec("P")
T = TypeVar("T")
ON_HEAD = Path(__file__).parent / "on_head"
PACKAGE = f"{__package__}.{ON_HEAD.name}"
BOOT = f"""import base64, json, sys, types, zlib
for name, text in json.loads(zlib.decompress(base64.b64decode(sys.stdin.readline()))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(text, vars(module))
sys.modules["{PACKAGE}"].serve()
"""
ARGV = ("python3", "-I", "-c", BOOT)
LONGEST = 64 << 20
"""Characters of an answer."""


class HeadError(LaunchError):
    """The head cannot be reached, or what it was asked for could not be done there."""

    exit_code = FAILED


class VerbError(HeadError):
    """It could not be done there; the head still answers."""


@cache
def code() -> str:
    """The first line that is sent: the modules as this program found them, in the order in which they import others."""
    names = {"fs": ".fs", "machines": ".machines", "run_folders": ".run_folders", "__init__": ""}
    modules = [(f"{PACKAGE}{suffix}", _source(name)) for name, suffix in names.items()]
    return base64.b64encode(zlib.compress(json.dumps(modules).encode(), 9)).decode()


def _source(name: str) -> str:
    return (ON_HEAD / f"{name}.py").read_text(encoding="utf-8")


class Questions:
    """A conversation with a head. Who asks holds `free`: the next question comes after the answer."""

    def __init__(self, program: Program) -> None:
        self._program, self._messages, self.free = program, program.messages(), threading.Lock()
        program.send(code())

    def ask(self, verb: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What a verb of on_head answers there. Raises VerbError, and ProgramError where the talk is over."""
        plain = [os.fspath(each) if isinstance(each, os.PathLike) else each for each in arguments]
        self._program.send({"verb": verb.__name__, "arguments": plain, "named": named})
        try:
            content = bounded_json(self._read())
        except ValueError as error:
            raise ProgramError(
                f"{self._program.where}: its answer to {verb.__name__} cannot be read: {error}"
            ) from error
        if isinstance(content, dict) and "error" in content:
            raise VerbError(f"{self._program.where}: {content['error']}")
        answer: Any = content.get("answer") if isinstance(content, dict) else None
        if not fits(answer, get_type_hints(verb)["return"]):
            raise ProgramError(f"{self._program.where}: its answer to {verb.__name__} is of another kind")
        return cast("T", answer)

    def _read(self) -> str:
        pieces, length = list[str](), 0
        for message in self._messages:
            pieces.append(str(message.get("piece")))
            length += len(pieces[-1])
            if length > LONGEST:
                raise ProgramError(f"{self._program.where}: an answer has more than {LONGEST} characters")
            if not message.get("more"):
                return "".join(pieces)
        raise ProgramError(f"{self._program.where}: the program ended without an answer")


ANSWER_S = 20.0
"""A cut connection shows no error for many minutes; a question unanswered for this long is taken for one."""
LONGER_S: dict[Callable[..., Any], float] = {
    **dict.fromkeys((run_folders.whole_checkpoint, run_folders.pack, run_folders.unpack, fs.copy, fs.sha256), 600.0),
    **dict.fromkeys((run_folders.details, fs.remove, fs.link_tree), 120.0),
    **dict.fromkeys((run_folders.discard, run_folders.remove_abandoned, run_folders.start), 60.0),
    **dict.fromkeys((machines.hardware_of_all, machines.room), machines.CARDS_S + 10),
}
"""Questions that take a head longer."""
NOT_STARTED = "the supervisor did not start; it said so in {folder}/logs/supervisor.log"


class Head(Protocol):
    """Where runs live and are supervised."""

    name: str
    runs: Path
    here: bool

    def shell(self, command: str, timeout_s: float = ANSWER_S) -> str:
        """stdout of a shell command, as root. Raises HeadError where it fails or nothing answers."""

    def ask(self, verb: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What a function of on_head answers there, as root. Raises HeadError where it fails or nothing answers."""

    def make_runs(self) -> None:
        """See to it that the folder of runs is there. Raises HeadError where its disk is not."""

    def put(self, archive: Path, folder: Path) -> None:
        """Unpack a local tar into a folder there."""

    def start_early(self, launch: Launch) -> None:
        """Start a supervisor that readies the nodes and waits for `start`, while the lock of starts is held."""

    def start(self, launch: Launch, *, early: bool = False) -> None:
        """Begin a run whose folder is in place; `early`: by the supervisor that waits."""

    def talk(self, command: str) -> Program:
        """Start a program, as root, and talk with it. Raises HeadError."""

    def close(self) -> None:
        """Nothing more is asked of it."""


class RemoteHead:
    """A node over ssh; a broken connection is closed, and made anew by the next question."""

    here = False

    def __init__(self, node: Node, deploy: str = "") -> None:
        """`deploy`: the command that makes the node ready, for whoever is to write there."""
        self.node, self.name, self.runs, self._deploy = node, node.name, REMOTE_RUNS, deploy
        self._connection: Any = None
        self._questions: Questions | None = None
        self._opening = threading.Lock()
        self._reads_runs = False

    def shell(self, command: str, timeout_s: float = ANSWER_S) -> str:
        try:  # in a thread of its own: invoke would keep Ctrl-C from us
            return within(timeout_s, lambda: ssh.run(self._open(), command, timeout_s=2 * timeout_s))
        except Exception as error:  # of ssh, of the socket, of time
            self.close()
            raise HeadError(str(error) or type(error).__name__) from error

    def ask(self, verb: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        try:  # in a thread of its own, which Ctrl-C does not interrupt in the middle of a line
            return within(LONGER_S.get(verb, ANSWER_S), lambda: self._answer(verb, *arguments, **named))
        except VerbError:
            raise
        except Exception as error:  # of ssh, of the socket, of time
            self.close()
            raise HeadError(str(error) or type(error).__name__) from error

    def _answer(self, verb: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """In a conversation of its own where another question, which Ctrl-C left behind, is not answered yet."""
        with self._opening:
            if self._questions is None or not self._questions.free.acquire(blocking=False):
                self._questions = Questions(self.talk(f"exec {shlex.join(ARGV)}"))
                self._questions.free.acquire()
            questions = self._questions
        try:
            return questions.ask(verb, *arguments, **named)
        finally:
            questions.free.release()

    def make_runs(self) -> None:
        if not self.ask(run_folders.make_runs, self.runs):
            raise HeadError(f"{self.name}: {NO_DATA_DISK.format(disk=self.runs.parent, deploy=self._deploy)}")

    def put(self, archive: Path, folder: Path) -> None:
        self.make_runs()
        remote_path = f"/tmp/spotune-{secrets.token_hex(16)}"
        try:
            self._send(archive, remote_path)
            self.ask(run_folders.unpack, remote_path, folder)
        finally:
            with contextlib.suppress(HeadError):  # it has gone away, or the reason is being raised already
                self.ask(fs.remove, remote_path)

    def _send(self, archive: Path, remote_path: str) -> None:
        """To a file that must not exist before and is the login user's alone, in a folder that is everybody's."""
        with self._moving("sent") as sftp, archive.open("rb") as source, sftp.open(remote_path, "wx") as file:
            file.chmod(0o600)
            file.set_pipelined(True)
            shutil.copyfileobj(source, file, 1 << 18)

    def get(self, path: Path, local: Path) -> None:
        """One file from there. Raises HeadError."""
        with self._moving("fetched") as sftp:
            sftp.get(str(path), str(local))

    @contextlib.contextmanager
    def _moving(self, done: str) -> Iterator[SFTPClient]:
        try:
            with self.open_sftp() as sftp:
                if channel := sftp.get_channel():
                    channel.settimeout(ANSWER_S)
                yield sftp
        except (EOFError, OSError, SFTPError, SSHException) as error:
            self.close()
            raise HeadError(
                f"{self.name}: the run's files could not be {done}: {error or type(error).__name__}"
            ) from error

    def start_early(self, launch: Launch) -> None:
        self.ask(run_folders.start_early, unit_argv(launch, early=True))

    def start(self, launch: Launch, *, early: bool = False) -> None:
        if not self.ask(run_folders.start, launch.run_dir, unit_argv(launch), ANSWER_S, early):
            raise HeadError(f"{self.name}: {NOT_STARTED.format(folder=launch.run_dir)}")

    def open_sftp(self) -> SFTPClient:
        """A new channel on the connection. Raises HeadError where the node's shell speaks first."""

        def opened() -> SFTPClient:
            if not self._reads_runs:
                self._answer(run_folders.own_runs, self.runs)
                self._reads_runs = True
            try:
                channel: SFTPClient = self._open().client.open_sftp()
            except SFTPError as error:
                raise HeadError(f"{self.name}: {error}: {SFTP_GARBAGE}") from None
            return channel

        return within(ANSWER_S, opened)

    def talk(self, command: str) -> Program:
        try:
            return node_program.start(self._open(), command, self.name)
        except Exception as error:  # of ssh, of the socket, of time
            self.close()
            raise HeadError(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Give the connection up."""
        self._questions = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> Any:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Any:
        return ssh.connect(self.node)


class HereHead:
    """This machine, for `--here`: runs live in ./runs and are already home."""

    here = True
    name = "this machine"

    def __init__(self, runs: Path) -> None:
        self.runs = runs.resolve()
        self._supervisor: subprocess.Popen[bytes] | None = None

    def shell(self, command: str, timeout_s: float = ANSWER_S) -> str:
        try:
            argv = ["sh", "-c", command]
            done = subprocess.run(argv, capture_output=True, errors="replace", timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise HeadError(f"{command.split(maxsplit=1)[0]}: no end within {timeout_s:.0f} s") from error
        if done.returncode != 0:
            raise HeadError(f"{command.split(maxsplit=1)[0]}: {done.stderr.strip()}")
        return done.stdout

    def ask(self, verb: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return verb(*arguments, **named)
        except OSError as error:
            raise HeadError(f"{self.name}: {words(error, arguments)}") from error

    def make_runs(self) -> None:
        self.runs.mkdir(parents=True, exist_ok=True)

    def put(self, archive: Path, folder: Path) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        how: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        shutil.unpack_archive(archive, folder, "gztar", **how)

    def start_early(self, launch: Launch) -> None:
        self._supervisor = _started(launch, early=True)

    def start(self, launch: Launch, *, early: bool = False) -> None:
        folder = Path(launch.run_dir)
        (folder / STOP).unlink(missing_ok=True)
        before = version_of(folder / STATUS)  # stays until there is another: a run without one is not found
        (folder / GO).touch()
        if not early or self._supervisor is None or self._supervisor.poll() is not None:
            self._supervisor = _started(launch)
        # the status says who the supervisor is: without one a look would take the run for lost
        deadline = time.monotonic() + ANSWER_S
        while version_of(folder / STATUS) == before and self._supervisor.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if version_of(folder / STATUS) == before:
            raise HeadError(NOT_STARTED.format(folder=folder))

    def talk(self, command: str) -> Program:
        return node_program.start_here(command)

    def close(self) -> None:
        """There is no connection."""


def _started(launch: Launch, early: bool = False) -> subprocess.Popen[bytes]:
    """A run's supervisor on this machine, started."""
    with Path(launch.run_dir, "logs", "supervisor.log").open("ab") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(supervisor_argv(launch, early), cwd=launch.run_dir, start_new_session=True, **streams)
