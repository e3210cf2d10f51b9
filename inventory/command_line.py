"""What all tasks share: a mistake ends in one sentence and an exit code, never in a traceback."""

from __future__ import annotations

import atexit
import errno
import inspect
import os
import re
import select
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from enum import Enum, auto
from types import TracebackType
from typing import Any

from invoke import Argument, Collection, Exit, ParseError, Task
from invoke.parser.context import to_flag

from inventory.errors import FAILURE, INTERRUPTED, USER_MISTAKE
from inventory.shown import only_json_on_stdout, show_plainly
from inventory.state import state_folder

WORDS = {int: "a whole number", float: "a number"}
SECONDS = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")
"""What the hub's client reads when it is imported, and cannot be imported with another value than a whole number."""

HELP = "--help"
SHORT = len("-y")
COMMAND = "command"
"""The flag of what stands behind `--`."""


class Word(Enum):
    """What a word is."""

    TASK = auto()
    FLAG = auto()
    VALUE = auto()
    BARE = auto()
    """Neither a task nor a flag nor a flag's value."""


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
        if code is None and isinstance(error, OSError) and _of_this_disk(error):
            where = error.filename or state_folder()
            way = "spotune needs a folder that it can write, on a disk with room and file locks: XDG_STATE_HOME, TMPDIR"
            raise Exit(f"{where}: {error.strerror}; {way}", code=FAILURE) from error
        if code is None and isinstance(error, ValueError) and (wrong := _wrong_seconds()):
            raise Exit(wrong, code=USER_MISTAKE) from error
        if code is None:
            raise
        raise Exit(str(error), code=code) from error


def _of_this_disk(error: OSError) -> bool:
    """Whether this machine's disk is to blame: any file of spotune's state, or a disk that is full, read-only, broken
    or has no locks."""
    full = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOLCK, errno.ENOTSUP, errno.EIO}
    return error.errno in full or str(error.filename or "").startswith(str(state_folder()))


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


def yes_command(name: str, task: Any, **arguments: Any) -> str:
    """`fab NAME` with what differs from the task's defaults, and --yes; `arguments`: its flags by their parameters."""
    defaults = inspect.signature(task).parameters
    flags = [_flag(key, value) for key, value in arguments.items() if value != defaults[key].default]
    return " ".join(["fab", name, *flags, "--yes"])


def _flag(parameter: str, value: Any) -> str:
    if value is False:
        return f"--no-{parameter.strip('_').replace('_', '-')}"
    flag = f"--{parameter.strip('_').replace('_', '-')}"
    if value is True:
        return flag
    return f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {shlex.quote(str(value))}"


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


def _wrong_seconds() -> str:
    """Which of `SECONDS` has no whole number, as a sentence; empty where each can be read."""
    for name in SECONDS:
        if not re.fullmatch(r"\s*[+-]?\d+\s*", os.environ.get(name, "0")):
            return f"{name} = {os.environ[name]}: a whole number of seconds is expected"
    return ""


def say(line: str) -> None:
    """A line at once, also where the output is a pipe."""
    print(line, flush=True)


def read_command_line(bare: Mapping[str, str], tasks: Collection) -> None:
    """Let the program that is reading this fabfile take its command line as `spelled_out`, list the commands where it
    is empty, and answer a task or a flag it does not know with the nearest one and code 2. It has parsed no more than
    its own flags so far."""
    from fabric.main import program

    parse = program.parse_tasks

    def parse_tasks() -> None:
        read = [*_read(program.core.unparsed, tasks)]
        as_json = any(word.partition("=")[0] == "--json" and kind is Word.FLAG for _, word, kind in read)
        with only_json_on_stdout() if as_json else nullcontext():
            for task, word, kind in read[-1:]:
                last = _argument(task, word, tasks) if kind is Word.FLAG else None
                if last and last.takes_value and not last.optional:  # invoke lets it pass where it may be repeated
                    raise Exit(f"fab {task} {word} needs a value; fab --help {task}", code=USER_MISTAKE)
            try:
                parse()
            except ParseError as error:
                raise Exit(not_understood(error, tasks), code=USER_MISTAKE) from error

    program.parse_tasks = parse_tasks
    if core := getattr(program, "core", None):  # none where no program runs: in a test
        if help_task := help_wanted(core.unparsed, tasks):
            core[0].args["help"].value, core.unparsed = help_task, []
        if not sys.argv[1:]:
            core[0].args["list"].set_value(True, cast=False)
            print("fab --help COMMAND shows what a command takes; README.md shows how to begin\n")
        core.unparsed, core.remainder = spelled_out(core.unparsed, core.remainder, bare, tasks)


def not_understood(error: ParseError, tasks: Collection) -> str:
    """What is said of a command line that invoke refuses: its own words, unless it does not know a task or a flag."""
    task = (error.context and error.context.name) or ""
    if error.context and (missing := error.context.missing_positional_args):
        return f"fab {task} needs {', '.join(each.name.upper() for each in missing)}; fab --help {task}"
    unknown = re.fullmatch(r"No idea what '(.*)' is!", str(error), re.DOTALL)
    if unknown is None:
        return f"{error}{f'; fab --help {task}' if task else ''}"
    word = unknown[1].partition("=")[0]
    if not task:
        return f"there is no fab {word}{_nearest(word, list(tasks.task_names))}; fab --list shows all"
    if not word.startswith("-"):
        return f"fab {task} does not know {word!r}; fab --help {task}"
    flags = [flag for flag in error.context.flags if flag.startswith("--")]
    near = _nearest(word, flags) or ("; recipe keys are set with --set KEY=VALUE" if "--set" in flags else "")
    return f"fab {task} has no {word}{near}; fab --help {task}"


def spelled_out(words: Sequence[str], rest: str, bare: Mapping[str, str], tasks: Collection) -> tuple[list[str], str]:
    """A command line with the flags that may go unsaid, and what is left of the words behind its `--`.

    `fab ssh te2 -- uptime` is `fab ssh --node te2 --command uptime`. `bare`: of a task, the flag of the words that are
    no other flag's value. invoke knows no such flags, and keeps what is behind `--` for fabric's own shells.
    """
    expanded, task, flag = list[str](), "", ""
    for task, word, kind in _read(words, tasks):
        once = bool(flag) and flag not in tasks[task].iterable
        if kind is Word.TASK:
            flag = bare.get(word, "")
        elif kind is Word.BARE and flag:
            expanded.append(f"--{flag}")
            flag = "" if once else flag
        elif kind is Word.FLAG and word == f"--{flag}" and once:
            flag = ""
        expanded.append(word)
    if rest and task and any(COMMAND in argument.names for argument in tasks[task].get_arguments()):
        return [*expanded, f"--{COMMAND}", rest], ""
    return expanded, rest


def help_wanted(words: Sequence[str], tasks: Collection) -> str:
    """The task behind whose name stands `--help`, which invoke takes for the value of one that needs some; empty where
    none is asked about."""
    return next((task for task, word, kind in _read(words, tasks) if kind is Word.FLAG and word == HELP), "")


def _read(words: Sequence[str], tasks: Collection) -> Iterator[tuple[str, str, Word]]:
    """Each word behind the task it is said to, empty before the first."""
    task, flag = "", None
    # also the short ones: `fab runs` is `fab runs.list`
    names = {name for each, short in tasks.task_names.items() for name in (each, *short)}
    for word in words:
        if flag and flag.takes_value and not (flag.optional and word.startswith("-")):
            kind, flag = Word.VALUE, None
        elif word.startswith("-"):
            kind, flag = Word.FLAG, _argument(task, word, tasks)
        elif word in names and word != task:  # nobody says a task twice: `fab data data` looks into a folder
            task, kind, flag = word, Word.TASK, None
        else:
            kind, flag = Word.BARE, None
        yield task, word, kind


def _argument(task: str, word: str, tasks: Collection) -> Argument | None:
    """What a task calls by this flag; None where it has none of that name."""
    if not task or not word.startswith("-"):
        return None
    return next((each for each in tasks[task].get_arguments() if word in map(to_flag, each.names)), None)


def _nearest(word: str, known: Sequence[str]) -> str:
    """What may be meant; of a single letter, what begins with it."""
    short = [each for each in known if each.startswith(f"-{word}")] if len(word) == SHORT else []
    bare = {each.lstrip("-"): each for each in known}  # the dashes, which all share, make no two flags alike
    near = short[:1] or [bare[each] for each in get_close_matches(word.lstrip("-"), list(bare), n=1)]
    return f"; the nearest is {near[0]}" if near else ""


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
        with only_json_on_stdout() if kwargs.get("json") else nullcontext():
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
