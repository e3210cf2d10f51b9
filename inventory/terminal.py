"""Tables and text on a terminal, by rich: what is printed is text, never markup, and its control characters are shown
instead of sent."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from inventory.shown import shown

WIDE = 200
"""Columns where no terminal is, and COLUMNS does not say how many."""
GAP = 2
"""Blanks between two columns of a table."""
LEAST_WORDS = 20
"""Columns that words are given at least, where they are so long: narrower ones stand below."""


class Plain(Console):
    """A console that shows every text as it is."""

    def render_str(self, text: str, **how: Any) -> Text:
        """A text before it is measured."""
        return super().render_str(shown(text), **how)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))

    def own_file(self) -> IO[str]:
        """The stream below those that escape by themselves, and below the one of rich while it shows what moves."""
        stream = Console.file.fget(self)  # type: ignore[attr-defined]
        while inner := getattr(stream, "rich_proxied_file", None):
            stream = inner
        return cast("IO[str]", stream)

    file = property(own_file, Console.file.fset)  # type: ignore[attr-defined]


def console(**options: Any) -> Console:
    """The one kind of console of this project. Where no terminal is it is wide."""
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
        whole = max(map(cell_len, [name, *cells]))
        may_wrap = name in self.words
        pieces = [*name.split(), *(word for cell in cells for word in (cell.split() if may_wrap else [cell]))]
        least = max(map(cell_len, pieces), default=0)
        if may_wrap:
            least = max(least, min(whole, LEAST_WORDS))
        return least, whole

    def _below(self, row: Sequence[Any], beside: int, most: int) -> Iterator[RenderableType]:
        lines = list[str]()
        for name, cell in list(zip(self.header, map(str, row), strict=False))[beside:]:
            if cell in ("", "-"):
                continue
            text = shown(f"{name}: {cell}" if name else cell)
            if lines and cell_len(lines[-1]) + GAP + cell_len(text) <= most - GAP:
                lines[-1] += " " * GAP + text
            else:
                lines.append(text)
        for line in lines:
            yield Padding(Text(line, overflow="fold"), (0, 0, 0, GAP))
