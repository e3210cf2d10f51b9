"""JSON and numbers that another machine wrote: a head, a node or a hub may put anything there. Standard library only.

Whatever is read here can be compared, added, shown as a date and counted as money.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST = 1e30
"""Numbers in a JSON text are below this, which is far above any count of ours."""
FIGURES = (-1e10, 1e11)
"""Between these is a figure of a run, as a time, a step or a price; as seconds since 1970 the years 1653 and 5138."""
DEEPEST, LONGEST = 64, 256 << 20
"""Lists and objects within each other; characters of a text."""


def bounded_json(text: str, constant: Callable[[str], Any] = lambda _: None) -> Any:
    """The value of a JSON text, with what `constant` makes of NaN and Infinity: null. Raises ValueError where it is
    none, too long, nested too deeply, or has a number that is not below MOST."""
    if len(text) > LONGEST:
        raise ValueError(f"it has {len(text)} characters, more than {LONGEST}")
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=constant)
        deep = text.count("{") + text.count("[") > DEEPEST and _depth(value) > DEEPEST
    except RecursionError:
        deep = True
    if deep:
        raise ValueError("it is nested too deeply")
    return value


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside), default=0)


def object_in(path: Path, parse: Callable[[str], Any] = bounded_json) -> dict[str, Any]:
    """The object in a file; nothing where there is none, or half of one."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_figure(value: Any) -> bool:
    """Whether it is a finite number of a size that a run can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and FIGURES[0] < value < FIGURES[1]


def figure_in(text: str) -> float:
    """The figure that a text is, as 1700000000.5; 0 where it is none."""
    return float(text) if re.fullmatch(r"[0-9]{1,11}(\.[0-9]{1,20})?", text.strip()) else 0.0


def _whole(text: str) -> int:
    if len(text) > 19 or abs(int(text)) >= MOST:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)


def _finite(text: str) -> float:
    if abs(value := float(text)) >= MOST:
        raise ValueError(f"{text:.30} is too large")
    return value
