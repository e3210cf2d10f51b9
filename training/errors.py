"""The base of the errors that end a command, or a rank, in one sentence. Standard library only."""

from __future__ import annotations

from typing import ClassVar

from training.exit_codes import FAILED


class TrainingError(Exception):
    """Its message is the whole sentence; its class says the exit code."""

    exit_code: ClassVar[int] = FAILED
