"""Text that is not ours, on a terminal: never markup, and its control characters are shown instead of sent.

What nodes, clouds, hubs and files say is data: `[/x]` in an error is no markup, and an escape sequence in a log moves
no cursor, hides nothing and sets no clipboard. rich is imported where it is used.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

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
