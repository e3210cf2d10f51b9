"""Running the system programs the local cloud is made of."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from inventory.errors import USER_MISTAKE, InventoryError

Report = Callable[[str], None]
"""Takes one line of progress for the user."""


class LocalCloudError(InventoryError, RuntimeError):
    """The local cloud cannot do what was asked; the message says what failed and what to do."""

    exit_code = USER_MISTAKE


def run(*argv: str | Path, stdin: str | None = None) -> str:
    """Run a program and return its stdout. Raises LocalCloudError with its own last words."""
    done = attempt(*argv, stdin=stdin)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()[-5:]
        reason = "\n  ".join(words) or "it gave no reason"
        raise LocalCloudError(f"`{shlex.join(map(str, argv))}` ended with code {done.returncode}: {reason}")
    return done.stdout


def attempt(*argv: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program whose failure is an answer too."""
    return subprocess.run(_text(argv), input=stdin, capture_output=True, text=True, check=False)


def _text(argv: Sequence[str | Path]) -> list[str]:
    return [str(word) for word in argv]
