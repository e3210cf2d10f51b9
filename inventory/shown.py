"""What people see on a terminal: tables, ages, and text that is not ours, never as markup, its control characters shown
instead of sent.

What nodes, clouds, hubs and files say is data: `[/x]` in an error is no markup, and an escape sequence in a log moves
no cursor, hides nothing and sets no clipboard. rich is imported where it is used.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

WIDE = 200
"""Columns where no terminal is, and COLUMNS does not say how many."""
GAP = 2
"""Blanks between two columns of a table."""
LEAST_WORDS = 20
"""Columns that words are given at least, where they are so long: narrower ones stand below."""

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


def console(**options: Any) -> Console:
    """The one kind of rich console of this house: what is printed is text, styles are said beside it. Where no terminal
    is it is wide."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(shown(text), **how)  # before it is measured

        def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=shown(segment.text))

        def own_file(self) -> IO[str]:
            """Past all that stand before the stream: while rich shows what moves it puts one before `_Shown`."""
            stream = Console.file.fget(self)  # type: ignore[attr-defined]
            while inner := getattr(stream, "rich_proxied_file", None):
                stream = inner
            return cast("IO[str]", stream)

        file = property(own_file, Console.file.fset)  # type: ignore[attr-defined]

    made = Plain(**{"markup": False, "emoji": False, "highlight": False, **options})
    if "width" not in options and not made.is_terminal and not os.environ.get("COLUMNS"):
        made.width = WIDE
    return made


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], words: Collection[str] = ()) -> Grid:
    """Rows of text, or of rich's own Text, under a header, for a console. Only the columns of `words` wrap, and those
    between two words: an id, a price or a time that is cut is of no use."""
    return Grid(header, list(rows), words)


@dataclass(frozen=True)
class Grid:
    """A table for a console of any width. Where it is too narrow the last columns stand below each row, as
    `heading: value`."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    words: Collection[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.table import Table

        widths = self._widths(options.max_width)
        for number, row in enumerate(self.rows or [()]):
            grid = Table(box=None, pad_edge=False, show_header=number == 0)
            for name, width in zip(self.header, widths, strict=False):
                grid.add_column(name, width=width, overflow="fold")
            if row:
                grid.add_row(*row[: len(widths)])
            yield grid
            yield from self._below(row, len(widths), options.max_width)

    def _widths(self, most: int) -> list[int]:
        """Of the columns that stand beside each other; what is left over goes to the narrowest that want it."""
        sizes = [self._sizes(place) for place in range(len(self.header))]
        while len(sizes) > 1 and sum(least for least, _ in sizes) + GAP * (len(sizes) - 1) > most:
            sizes.pop()
        widths = [min(least, most) for least, _ in sizes]
        for _ in range(most - sum(widths) - GAP * (len(sizes) - 1)):
            growing = [place for place, (_, whole) in enumerate(sizes) if widths[place] < whole]
            if growing:
                widths[min(growing, key=widths.__getitem__)] += 1
        return widths

    def _sizes(self, place: int) -> tuple[int, int]:
        """The least width of a column, and the one in which nothing wraps. Headings wrap too."""
        name = self.header[place]
        cells = [line for row in self.rows for line in shown(str(row[place])).splitlines()]
        whole = max(map(_width, [name, *cells]))
        may_wrap = name in self.words
        pieces = [*name.split(), *(word for cell in cells for word in (cell.split() if may_wrap else [cell]))]
        least = max(map(_width, pieces), default=0)
        if may_wrap:
            least = max(least, min(whole, LEAST_WORDS))
        return least, whole

    def _below(self, row: Sequence[Any], beside: int, most: int) -> Iterator[RenderableType]:
        from rich.padding import Padding
        from rich.text import Text

        lines = list[str]()
        for name, cell in list(zip(self.header, map(str, row), strict=False))[beside:]:
            if cell in ("", "-"):
                continue
            text = shown(f"{name}: {cell}" if name else cell)
            if lines and _width(lines[-1]) + GAP + _width(text) <= most - GAP:
                lines[-1] += " " * GAP + text
            else:
                lines.append(text)
        for line in lines:
            yield Padding(Text(line, overflow="fold"), (0, 0, 0, GAP))


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


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
    """From now on all that this program prints is `shown`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Shown):
            setattr(sys, name, _Shown(stream))
