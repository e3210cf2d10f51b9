"""What is typed behind `fab`, word by word: flags that go unsaid, help, and what is not understood. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum, auto

from invoke import Argument, Collection, ParseError
from invoke.parser.context import to_flag

Meant = Callable[[str, Sequence[str], Sequence[str]], str]
"""Of a word that is not understood, a task's flags and all words: what may be meant, as it is typed; empty where
nothing is."""
HELP = "--help"
SHORT = len("-y")
DASHES = "－—–−‐"
"""That look like a flag's."""
COMMAND = "command"
"""The flag of what stands behind `--`."""


class Kind(Enum):
    """What a word is."""

    TASK = auto()
    FLAG = auto()
    VALUE = auto()
    BARE = auto()
    """Neither a task nor a flag nor a flag's value."""


def spelled_out(words: Sequence[str], rest: str, bare: Mapping[str, str], tasks: Collection) -> tuple[list[str], str]:
    """A command line with the flags that may go unsaid, and what is left of the words behind its `--`.

    `fab ssh te2 -- uptime` is `fab ssh --node te2 --command uptime`. `bare`: of a task, the flag of the words that are
    no other flag's value. invoke knows no such flags, and keeps what is behind `--` for fabric's own shells.
    """
    said, task, flag = list[str](), "", ""
    for task, word, kind in _read(words, tasks):
        once = bool(flag) and flag not in tasks[task].iterable
        if kind is Kind.TASK:
            flag = bare.get(word, "")
        elif kind is Kind.BARE and flag:
            said.append(f"--{flag}")
            flag = "" if once else flag
        elif kind is Kind.FLAG and word == f"--{flag}" and once:
            flag = ""
        said.append(word)
    if rest and task and any(COMMAND in argument.names for argument in tasks[task].get_arguments()):
        return [*said, f"--{COMMAND}", rest], ""
    return said, rest


def help_wanted(words: Sequence[str], tasks: Collection) -> str:
    """The task behind whose name stands `--help`, which invoke takes for the value of one that needs some; empty where
    none is asked about."""
    return next((task for task, word, kind in _read(words, tasks) if kind is Kind.FLAG and word == HELP), "")


def without_value(words: Sequence[str], tasks: Collection) -> str:
    """What is said of a flag behind which its value is missing; empty where all have theirs. invoke lets it pass where
    the flag may be repeated."""
    for (task, word, kind), value in zip(_read(words, tasks), [*words[1:], ""], strict=False):
        argument = _argument(task, word, tasks) if kind is Kind.FLAG and "=" not in word else None
        if argument and argument.takes_value and not argument.optional and (not value or _argument(task, value, tasks)):
            return f"fab {task} {word} needs a value; fab --help {task}"
    return ""


def with_other_dashes(words: Sequence[str], tasks: Collection) -> str:
    """What is said of a flag with the dashes of a Chinese keyboard or of a text program; empty where there is none."""
    for task, word, kind in _read(words, tasks):
        name, equals, value = word.lstrip(f"{DASHES}-").partition("＝")
        if task and kind is Kind.BARE and word[:1] in DASHES and name.isascii() and name[:1].isalpha():
            said = f"{'-' if len(name) == 1 else '--'}{name}{'=' * len(equals)}{value}"
            return f"fab {task} {word}: {word[0]} is no dash of a flag; write {shlex.quote(said)}"
    return ""


def said_twice(words: Sequence[str], tasks: Collection) -> str:
    """What is said of a flag that takes one value and has two; empty where none has. invoke knows no second one."""
    said = set[tuple[str, str]]()
    for task, word, kind in _read(words, tasks):
        argument = _argument(task, word.partition("=")[0], tasks) if kind is Kind.FLAG else None
        if not argument or not argument.takes_value or argument.kind is list:
            continue
        if (task, argument.names[0]) in said:
            return f"fab {task} takes one {to_flag(argument.names[0])}; fab --help {task}"
        said.add((task, argument.names[0]))
    return ""


def not_understood(error: ParseError, words: Sequence[str], tasks: Collection, meant: Meant) -> str:
    """What is said of a command line that invoke refuses. Its own words, unless one of `words` is unknown to it.
    `meant`: what the unknown one may be."""
    typed = [word.partition("=")[0] if word.startswith("-") else word for word in words]
    unknown = next((word for word in typed if str(error) == f"No idea what {word!r} is!"), None)
    task = (error.context and error.context.name) or ""
    if error.context and unknown is None and (missing := error.context.missing_positional_args):
        return f"fab {task} needs {', '.join(each.name.upper() for each in missing)}; fab --help {task}"
    if unknown is None:
        return f"{error}{f'; fab --help {task}' if task else ''}"
    if not task:
        return f"there is no fab {unknown}{_nearest(unknown, list(tasks.task_names))}; fab --list shows all"
    if not unknown.startswith("-"):
        said = meant(unknown, _flags(error), words) if unknown else ""
        return f"fab {task} knows no {unknown!r}; {f'did you mean {said}? ' if said else ''}fab --help {task}"
    said = meant(unknown, _flags(error), words)
    near = f"; it is {said}" if said else _nearest(unknown, _flags(error))
    return f"fab {task} has no {unknown}{near}; fab --help {task}"


def _flags(error: ParseError) -> list[str]:
    return [flag for flag in error.context.flags if flag.startswith("--")]


def _read(words: Sequence[str], tasks: Collection) -> Iterator[tuple[str, str, Kind]]:
    """Each word behind the task it is said to, empty before the first."""
    task, flag, names = "", None, _names(tasks)
    for word in words:
        if flag and flag.takes_value and not (flag.optional and word.startswith("-")):
            kind, flag = Kind.VALUE, None
        elif word.startswith("-"):
            kind, flag = Kind.FLAG, _argument(task, word, tasks)
        elif word in names and word != task:  # nobody says a task twice: `fab data data` looks into a folder
            task, kind, flag = word, Kind.TASK, None
        else:
            kind, flag = Kind.BARE, None
        yield task, word, kind


def _names(tasks: Collection) -> set[str]:
    """Of all tasks, also the short ones: `fab runs` is `fab runs.list`."""
    return {name for each, short in tasks.task_names.items() for name in (each, *short)}


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
