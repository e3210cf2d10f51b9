"""What all tasks share: a mistake ends in one sentence and an exit code, never in a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from invoke import Argument, Collection, Exit, Task

USER_MISTAKE = 2
FAILURE = 1
WORDS = {int: "a whole number", float: "a number"}


@contextmanager
def one_sentence(
    mistakes: tuple[type[Exception], ...] = (), failures: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """End the task with the error's own words: code 2 for the user's mistakes, code 1 for what failed.

    Unusable settings are always a mistake, a node that cannot be reached always a failure.
    """
    from inventory.settings import SettingsError
    from inventory.ssh import SshError

    mistakes, failures = (SettingsError, *mistakes), (SshError, *failures)
    try:
        yield
    except failures as error:  # first: a failure may be a kind of a mistake's error
        raise Exit(str(error), code=FAILURE) from error
    except mistakes as error:
        raise Exit(str(error), code=USER_MISTAKE) from error


class _Argument(Argument):
    def set_value(self, value: Any, cast: bool = True) -> None:
        try:
            super().set_value(value, cast)
        except ValueError:
            raise Exit(f"--{self.names[0]} needs {WORDS[self.kind]}, not {value!r}", code=USER_MISTAKE) from None


class _Task(Task):
    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        arguments: list[Argument] = super().get_arguments(ignore_unknown_help)
        for argument in arguments:
            argument.__class__ = _Argument
        return arguments


def refuse_malformed_flags(namespace: Collection) -> None:
    """Let every task of a namespace answer `--steps abc` in one sentence.

    invoke converts a flag's text by the type of its default and lets the ValueError through. It has no hook for
    that; the class of a task is the one thing it keeps when it copies a namespace.
    """
    for task in namespace.tasks.values():
        task.__class__ = _Task
    for collection in namespace.collections.values():
        refuse_malformed_flags(collection)
