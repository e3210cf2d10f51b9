"""The base of the errors that end a command, or a rank, in one sentence. Standard library only."""

from __future__ import annotations

from typing import ClassVar

from training.exit_codes import FAILED, UNUSABLE


class TrainingError(Exception):
    """Its message is the whole sentence; its class says the exit code."""

    exit_code: ClassVar[int] = FAILED


class AdapterError(TrainingError, ValueError):
    """What was asked cannot be done with this adapter, model or place; the message says why."""

    exit_code = UNUSABLE
