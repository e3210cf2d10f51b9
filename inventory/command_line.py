"""What all tasks share: a mistake ends in one sentence and an exit code, never in a traceback."""

from __future__ import annotations

import atexit
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from invoke import Argument, Collection, Exit, ParseError, Task
from invoke.parser.context import to_flag

from inventory.errors import FAILURE, INTERRUPTED, USER_MISTAKE
from inventory.shown import show_plainly
from inventory.typed_words import (
    Meant,
    help_wanted,
    not_understood,
    said_twice,
    spelled_out,
    with_other_dashes,
    without_value,
)

WORDS = {int: "a whole number", float: "a number"}


@contextmanager
def sentences(interrupted: str = "interrupted") -> Iterator[None]:
    """End the task with the error's own words and the exit code of its class, where that has one: 2 for the user's
    mistakes, 1 for what failed. Ctrl-C ends it with `interrupted`, which says what is left behind, and code 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise Exit(interrupted, code=INTERRUPTED) from None
    except Exception as error:
        # by the attribute: the errors of the rooms have no base in common, since training's go to the nodes alone
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        raise Exit(str(error), code=code) from error


def end_quietly_without_a_reader() -> None:
    """Let `fab status | head` end as other programs do: without a word once nobody reads what is printed."""
    reported = sys.excepthook

    def is_unread() -> bool:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if unread := any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return unread

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (isinstance(error, BrokenPipeError) and is_unread()):
            reported(kind, error, trace)

    sys.excepthook = report
    atexit.register(is_unread)


def ask(yes: bool, question: str, command: str) -> None:
    """Go on where the answer is yes, else end the task. `command`: the one that says yes where nobody can be asked."""
    if not yes and not agreed(question, f"to say yes: {command}"):
        raise Exit("nothing was done", code=FAILURE)


def agreed(question: str, otherwise: str) -> bool:
    """The answer at the terminal; Ctrl-D is a no, and Ctrl-C ends the task before anything was done. Where there is no
    terminal the task ends with what to do `otherwise`."""
    if not sys.stdin.isatty():
        raise Exit(f"{question} There is no terminal to ask at; {otherwise}", code=USER_MISTAKE)
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


def allow_bare_words(bare: Mapping[str, str], tasks: Collection) -> list[str]:
    """Let the program that is reading this fabfile take its command line as `spelled_out`: it has parsed no more of it
    than its own flags so far. Returns the words as they were typed."""
    from fabric.main import program

    typed = list[str]()
    if core := getattr(program, "core", None):  # none where no program runs: in a test
        typed = list(core.unparsed)
        if asked := help_wanted(core.unparsed, tasks):
            core[0].args["help"].value, core.unparsed = asked, []
        if wrong := with_other_dashes(core.unparsed, tasks) or without_value(core.unparsed, tasks):
            raise Exit(wrong, code=USER_MISTAKE)
        core.unparsed, core.remainder = spelled_out(core.unparsed, core.remainder, bare, tasks)
        if twice := said_twice(core.unparsed, tasks):
            raise Exit(twice, code=USER_MISTAKE)
    return typed


def name_the_nearest(tasks: Collection, meant: Meant, typed: Sequence[str]) -> None:
    """Let the same program answer a task or a flag it does not know with what is `meant` by it among the words that
    were typed, else with the nearest it does know, and code 2."""
    from fabric.main import program

    parse = program.parse_tasks

    def parse_tasks() -> None:
        try:
            parse()
        except ParseError as error:
            raise Exit(not_understood(error, typed, tasks, meant), code=USER_MISTAKE) from None

    program.parse_tasks = parse_tasks


class _Argument(Argument):
    def __repr__(self) -> str:
        """As it is typed: invoke's own sentences have it."""
        return to_flag(self.names[0])

    def set_value(self, value: Any, cast: bool = True) -> None:
        try:
            super().set_value(value, cast)
        except ValueError:
            raise Exit(f"--{self.names[0]} needs {WORDS[self.kind]}, not {value!r}", code=USER_MISTAKE) from None


class _Task(Task):
    help: dict[str, str]

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        texts = dict(self.help)  # which invoke takes out as it goes: they would be gone the second time
        arguments: list[Argument] = super().get_arguments(ignore_unknown_help)
        self.help = texts
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
