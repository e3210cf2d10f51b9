"""What people see on a terminal: tables, ages, and text that is not ours, never as markup, its control characters shown
instead of sent.

What nodes, clouds, hubs and files say is data: `[/x]` in an error is no markup, and an escape sequence in a log moves
no cursor, hides nothing and sets no clipboard. rich is imported where it is used.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All control characters but the ends of lines and tabs; what turns the direction of writing; half characters."""


def shown(text: str) -> str:
    """The text with every character that a terminal would obey written out, as in `\\x1b[2J`."""
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def console(**options: Any) -> Console:
    """The one kind of rich console of this house: what is printed is text, styles are said beside it."""
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(shown(text), **how)  # before it is measured

        def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=shown(segment.text))

    return Plain(**{"markup": False, "emoji": False, "highlight": False, **options})


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Rows of text, or of rich's own Text, under a header, for a console; an id that is cut off is of no use."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for name in header:
        grid.add_column(name, no_wrap=name == header[0], overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def age(seconds: float) -> str:
    """A length of time in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def clock(at: datetime | None) -> str:
    """A moment in local time."""
    return f"{at.astimezone():%Y-%m-%d %H:%M}" if at else "never"


def money(amount: float, currency: str = "") -> str:
    """An amount as a table shows it."""
    return f"{amount:.2f}{f' {currency}' if currency else ''}"


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
    """From now on all that this program prints is `shown`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Shown):
            setattr(sys, name, _Shown(stream))
