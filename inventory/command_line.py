"""What all tasks share: a mistake ends in one sentence and an exit code, never in a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from invoke import Argument, Collection, Exit, Task

from inventory.shown import show_plainly

INTERRUPTED = 130
USER_MISTAKE = 2
FAILURE = 1
WORDS = {int: "a whole number", float: "a number"}


@contextmanager
def one_sentence(
    mistakes: tuple[type[Exception], ...] = (), failures: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """End the task with the error's own words: code 2 for the user's mistakes, code 1 for what failed.

    Unusable settings and what cannot be rented are always a mistake, a node that cannot be reached and a cloud that
    refuses always a failure.
    """
    from inventory.cloud.errors import CloudError, RentError
    from inventory.settings import SettingsError
    from inventory.ssh import SshError

    mistakes, failures = (SettingsError, RentError, *mistakes), (SshError, CloudError, *failures)
    try:
        yield
    except failures as error:  # first: a failure may be a kind of a mistake's error
        raise Exit(str(error), code=FAILURE) from error
    except mistakes as error:
        raise Exit(str(error), code=USER_MISTAKE) from error


@contextmanager
def sentences(
    interrupted: str = "interrupted",
    mistakes: tuple[type[Exception], ...] = (),
    failures: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """As one_sentence; Ctrl-C ends the task with `interrupted`, which says what is left behind, and code 130."""
    try:
        with one_sentence(mistakes, failures):
            yield
    except KeyboardInterrupt:
        raise Exit(interrupted, code=INTERRUPTED) from None


def ask(yes: bool, question: str, command: str) -> None:
    """Go on where the answer is yes, else end the task. `command`: the one that says yes where nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Exit(f"{question} There is no terminal to ask at; to say yes: {command}", code=USER_MISTAKE)
    if not agreed(question):
        raise Exit("nothing was done", code=FAILURE)


def agreed(question: str) -> bool:
    """The answer at the terminal; Ctrl-D is a no, and Ctrl-C ends the task before anything was done."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        print()
        return False
    except KeyboardInterrupt:
        raise Exit("nothing was done", code=INTERRUPTED) from None


def say(line: str) -> None:
    """A line at once, also where the output is a pipe."""
    print(line, flush=True)


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # invoke takes --dry of a task that has none for its own global flag, which only shell commands heed
        show_plainly()
        if args[0].config.run.dry:
            raise Exit(f"fab {self.name} has no --dry; nothing was done", code=USER_MISTAKE)
        return super().__call__(*args, **kwargs)


def refuse_malformed_flags(namespace: Collection) -> None:
    """Let every task of a namespace answer `--steps abc`, and a `--dry` it does not have, in one sentence, and print
    what others say as it is.

    invoke converts a flag's text by the type of its default and lets the ValueError through. It has no hook for
    that; the class of a task is the one thing it keeps when it copies a namespace.
    """
    for task in namespace.tasks.values():
        task.__class__ = _Task
    for collection in namespace.collections.values():
        refuse_malformed_flags(collection)
