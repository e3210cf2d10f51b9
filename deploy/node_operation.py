"""How pyinfra 3.10 runs our operations: what a shell prints by itself is no answer, a fact that failed ends its host, a
node's words are printed without escape sequences, and each group's time is written down where it is asked for.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec

import click
from paramiko import ChannelException, SFTPError, SSHException
from pyinfra import host, logger, state
from pyinfra.api import FactBase, Host, StringCommand, operation, output
from pyinfra.api.command import PyinfraCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.state import BaseStateCallback, State
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import CommandOutput, OutputLine
from pyinfra.context import ctx_host

from deploy.node_files import refuse
from inventory.cloud.errors import RentError
from inventory.renting.intents import alone
from inventory.renting.tags import StateFiles
from inventory.shown import shown_in_colour
from inventory.ssh import channel_error
from training.text.files import SFTP_GARBAGE, SHELL_ADVICE, Frame

Run = Callable[..., tuple[bool, CommandOutput]]


def framed(run: Run) -> Run:
    """SSHConnector.run_shell_command whose output is the command's alone; a shell that adds to it is named once."""

    @wraps(run)
    def run_framed(self: Any, command: StringCommand | str, *args: Any, **kwargs: Any) -> tuple[bool, CommandOutput]:
        frame = Frame()
        before, _, after = frame.around("\0").partition("\0")
        try:
            status, output = run(self, StringCommand(before, command, after, _separator=""), *args, **kwargs)
        except ChannelException as error:
            raise SSHException(channel_error(error)) from None
        answer, greeting = frame.split("".join(f"{line}\n" for line in output.stdout_lines))
        if greeting and not vars(self).setdefault("greeted", False):
            self.greeted = True
            logger.warning(f"{self.host.print_prefix}its shell prints {greeting!r} for every command; {SHELL_ADVICE}")
        answer_lines = [] if not answer else answer.removesuffix("\n").split("\n")
        errors = [line for line in output.combined_lines if line.buffer_name != "stdout"]
        lines = [OutputLine("stdout", line) for line in answer_lines] + errors
        return status and answer is not None, CommandOutput(lines)

    return run_framed


def sent(put_file: Callable[..., None]) -> Callable[..., None]:
    """SSHConnector._put_file; where a node has no sftp, or its shell speaks first, this host alone ends."""

    @wraps(put_file)
    def put(*args: Any) -> None:
        try:
            put_file(*args)
        except SFTPError as error:
            raise SSHException(f"{error}: {SFTP_GARBAGE}") from None
        except (ConnectError, EOFError) as error:
            raise SSHException(f"no sftp here: {error or 'its server ends at once'}") from None

    return put


SSHConnector.run_shell_command = framed(SSHConnector.run_shell_command)
SSHConnector._put_file = sent(SSHConnector._put_file)


Given = ParamSpec("Given")
Commands = Iterator[str | PyinfraCommand]


def _plainly(record: logging.LogRecord) -> bool:
    record.msg, record.args = shown_in_colour(record.getMessage()), None
    return True


logger.addFilter(_plainly)
if output.is_output_active():  # pyinfra's own program runs us
    output.set_echo(lambda message="", **how: click.echo(shown_in_colour(str(message)), **how))


def _answers() -> dict[Any, tuple[float, Any]]:
    """What this node was asked since something was last changed there, and when."""
    answers: dict[Any, tuple[float, Any]] = vars(ctx_host.get()).setdefault("spotune_answers", {})
    return answers


FRESH_S = 10.0
"""So old an answer may be: others may change a node too, while it waits for the operations of another."""


def known(fact: type[FactBase], **arguments: Any) -> Any:
    """A fact of this node, not asked again for a while unless an operation changes something there."""
    asked, answers = (fact, *sorted(arguments.items())), _answers()
    at, answer = answers.get(asked, (-FRESH_S, None))
    if time.monotonic() - at > FRESH_S:
        at, answer = time.monotonic(), host.get_fact(fact, **arguments)
        answers[asked] = at, answer
    return answer


def node_operation(body: Callable[Given, Commands]) -> Callable[..., Any]:
    """`@operation()` for a body that ends where a fact failed, on this host alone.

    pyinfra 3.10 hands out a failed fact's default and lets the body go on: what is missing in the answer
    would look like missing on the node, and be written over.
    """

    @wraps(body)
    def careful(*args: Given.args, **kwargs: Given.kwargs) -> Commands:
        for command in body(*args, **kwargs):
            if host in state.failed_hosts:
                break
            _answers().clear()
            yield command
        if host in state.failed_hosts:
            yield refuse(f"{host.name}: a question to this node got no answer; it was left as it is")

    return operation()(careful)


_until_exit = ExitStack()


@cache
def _hold(cluster: str) -> None:
    try:
        lock = StateFiles.of(cluster).folder / "deploy.busy"
        _until_exit.enter_context(alone(lock, "another base deploy of this cluster is running here"))
    except RentError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def deploy_alone() -> None:
    """End pyinfra with one sentence and code 2 where this machine is deploying to the same cluster already."""
    _hold(host.data.settings.name)  # asked once a host


FILE_VARIABLE = "SPOTUNE_OPERATION_TIMES"


class Stopwatch(BaseStateCallback):
    """Writes a line after each operation, and where one fails, so that a deploy that fails has told what it did."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.began: dict[str, float] = {}

    def operation_start(self, state: State, op_hash: str) -> None:
        self.began[op_hash] = time.time()

    def operation_host_error(
        self, state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        self.operation_end(state, op_hash)  # which is not called where no host is left

    def operation_end(self, state: State, op_hash: str) -> None:
        names = state.get_op_meta(op_hash).names
        group = min(names).partition(" | ")[0] if names else "?"
        line = json.dumps({"group": group, "began": self.began[op_hash], "ended": time.time()})
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def tell_operation_times() -> None:
    """Measure this deploy where its caller asks for that."""
    file = os.environ.get(FILE_VARIABLE)
    if file and not any(isinstance(each, Stopwatch) for each in state.callback_handlers):  # asked once a host
        state.add_callback_handler(Stopwatch(Path(file)))
