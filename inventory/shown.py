"""What people see on a terminal: ages, and text that is not ours, its control characters shown instead of sent.

What nodes, clouds, hubs and files say is data: an escape sequence in a log moves no cursor, hides nothing and sets no
clipboard. Tables: inventory/terminal.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime
from io import TextIOWrapper
from typing import Any, TextIO

from inventory.errors import FAILURE
from training.text.counts import finite

_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All control characters but the ends of lines and tabs; what turns the direction of writing; half characters."""

_COLOUR = re.compile(r"(\x1b\[(?:0|1|3[1-7])m)")


def shown(text: str) -> str:
    """The text with every character that a terminal would obey written out, as in `\\x1b[2J`."""
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def shown_in_colour(text: str) -> str:
    """The same, but for codes that make words bold, red to white, or plain again."""
    parts = _COLOUR.split(text)
    return "".join(part if place % 2 else shown(part) for place, part in enumerate(parts))


def age(seconds: float) -> str:
    """A length of time in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def length(seconds: float) -> str:
    """A length of time to the minute, as in `2 h 06 min`."""
    minutes = max(0, int(seconds // 60))
    return f"{minutes // 60} h {minutes % 60:02d} min"


def clock(at: datetime | None) -> str:
    """A moment in local time."""
    return f"{at.astimezone():%Y-%m-%d %H:%M}" if at else "never"


class _Shown:
    """A stream for print and for invoke's last sentences; rich, which escapes by itself, writes past it."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.rich_proxied_file.writelines(map(shown, lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def show_plainly() -> None:
    """From now on all that this program prints is `shown`, and what the terminal's encoding lacks is written out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Shown):
            if isinstance(stream, TextIOWrapper):
                with suppress(OSError):  # a file that cannot be sought in keeps its own way
                    stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Shown(stream))


_json_stdout = list[TextIO]()
"""The stdout of a task with --json, until its value is printed."""


@contextmanager
def only_json_on_stdout() -> Iterator[None]:
    """Within it stdout gets the first value of `print_json`, and all else goes to stderr. An error that comes before
    any is printed in its place, as `{"error": {"code", "message", "exit_status"}}`; the code is the error's class."""
    _json_stdout.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        if _json_stdout:
            cause = error.__cause__ or error
            status = getattr(error, "code", FAILURE)
            print_json({"error": {"code": type(cause).__name__, "message": str(error), "exit_status": status}})
        raise
    finally:
        _json_stdout.clear()


def print_json(value: Any) -> None:
    """A value for other programs; a number that is none is null."""
    print(json.dumps(finite(value), indent=1), file=_json_stdout.pop() if _json_stdout else sys.stdout, flush=True)
