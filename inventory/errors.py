"""The base of the errors that end a command in one sentence, with the exit codes they have."""

from __future__ import annotations

from typing import ClassVar

FAILURE = 1
USER_MISTAKE = 2
INTERRUPTED = 130


class InventoryError(Exception):
    """Its message is the whole sentence; its class says the exit code."""

    exit_code: ClassVar[int] = FAILURE
