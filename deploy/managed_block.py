"""A block of lines that is ours inside a file that is not. Pure."""

from __future__ import annotations

from collections.abc import Sequence

BEGIN = "# >>> spotune: the cluster's nodes, rewritten by every base deploy"
END = "# <<< spotune"


def outside(text: str) -> list[str]:
    """The file's lines without any block of ours, and without blank lines at the end."""
    lines, inside = [], False
    for line in text.splitlines():
        if line == BEGIN:
            inside = True
        elif line == END and inside:
            inside = False
        elif not inside:
            lines.append(line)
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def with_block(kept: Sequence[str], block: Sequence[str]) -> str:
    """The file's text: what is kept, then exactly one block."""
    return "\n".join([*kept, BEGIN, *block, END]) + "\n"
