"""The command that says yes to a task's question: the same one, with the flags it was given. Pure."""

from __future__ import annotations

import inspect
import shlex
from typing import Any


def yes_command(name: str, task: Any, **given: Any) -> str:
    """`fab NAME` with what differs from the task's defaults, and --yes; `given`: its flags by their parameters."""
    defaults = inspect.signature(task).parameters
    flags = [_flag(key, value) for key, value in given.items() if value != defaults[key].default]
    return " ".join(["fab", name, *flags, "--yes"])


def _flag(parameter: str, value: Any) -> str:
    if value is False:
        return f"--no-{parameter.strip('_').replace('_', '-')}"
    flag = f"--{parameter.strip('_').replace('_', '-')}"
    if value is True:
        return flag
    return f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {shlex.quote(str(value))}"
