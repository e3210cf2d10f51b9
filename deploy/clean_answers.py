"""pyinfra's ssh connector, held to framed answers: what a node's shell prints by itself never becomes a fact.

pyinfra 3.10 takes all that a command's channel brings for its output, in its own facts too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from paramiko import SFTPError, SSHException
from pyinfra import logger
from pyinfra.api import StringCommand
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import CommandOutput, OutputLine

from training.framed import SFTP_GARBAGE, SHELL_ADVICE, Frame

Run = Callable[..., tuple[bool, CommandOutput]]


def framed(run: Run) -> Run:
    """SSHConnector.run_shell_command whose output is the command's alone; a shell that adds to it is named once."""

    @wraps(run)
    def run_framed(self: Any, command: StringCommand | str, *args: Any, **kwargs: Any) -> tuple[bool, CommandOutput]:
        frame = Frame()
        before, _, after = frame.around("\0").partition("\0")
        status, output = run(self, StringCommand(before, command, after, _separator=""), *args, **kwargs)
        answer, greeting = frame.split("".join(f"{line}\n" for line in output.stdout_lines))
        if greeting and not vars(self).setdefault("greeted", False):
            self.greeted = True
            logger.warning(f"{self.host.print_prefix}its shell prints {greeting!r} for every command; {SHELL_ADVICE}")
        told = [] if not answer else answer.removesuffix("\n").split("\n")
        errors = [line for line in output.combined_lines if line.buffer_name != "stdout"]
        lines = [OutputLine("stdout", line) for line in told] + errors
        return status and answer is not None, CommandOutput(lines)

    return run_framed


def sent(put_file: Callable[..., None]) -> Callable[..., None]:
    """SSHConnector._put_file; where the shell's words stand in sftp's way, this host alone ends, with a sentence."""

    @wraps(put_file)
    def put(*args: Any) -> None:
        try:
            put_file(*args)
        except SFTPError as error:
            raise SSHException(f"{error}: {SFTP_GARBAGE}") from None

    return put


def _frame_answers() -> None:
    SSHConnector.run_shell_command = framed(SSHConnector.run_shell_command)
    SSHConnector._put_file = sent(SSHConnector._put_file)


_frame_answers()
