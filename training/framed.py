"""A command of ours and its answer, told apart from what a node's shell prints by itself. Pure.

sshd's bash reads ~/.bashrc for commands too: an `echo` there stands before every answer, a trap's words behind it. The
command's own output stands between two lines that are drawn anew for each call.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

SHELL_ADVICE = "let it print for terminals only, as in [ -t 1 ] && echo ... in its .bashrc"
SFTP_GARBAGE = f"the node's shell prints something before its sftp server speaks; {SHELL_ADVICE}"


@dataclass(frozen=True)
class Frame:
    """The two lines around one call's output."""

    mark: str = field(default_factory=lambda: f"spotune-{secrets.token_hex(8)}")

    @property
    def opening(self) -> str:
        """Shell that draws the line, on a line of its own whatever was printed before."""
        return f"printf '\\n%s\\n' {self.mark}; "

    def around(self, command: str) -> str:
        """The command between two lines; its exit code stays."""
        return f"{self.opening}(\n{command}\n); set -- $?; {self.opening}exit $1"

    def split(self, output: str) -> tuple[str | None, str]:
        """(what the command printed, the first line that the shell printed itself); None where no command ran."""
        greeting, opened, rest = f"\n{output}".partition(f"\n{self.mark}\n")
        if not opened:
            return None, _first_line(greeting)
        answer, closed, farewell = rest.rpartition(f"\n{self.mark}\n")
        return (answer, _first_line(greeting + farewell)) if closed else (rest, _first_line(greeting))


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
