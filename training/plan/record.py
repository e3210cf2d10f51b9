"""A dataclass of plain values out of a JSON file that may be damaged. Standard
library only. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_type_hints

from training.bounded import bounded_json

T = TypeVar("T")
Range = tuple[float, float]
ANY: Range = (1e-300, 1e300)
"""Of a number that nothing else is said of: above 0, and no infinity."""
FLOPS: Range = (1e9, 1e17)
"""A second: from a core of an old CPU to far above any card."""
BYTES_PER_S: Range = (1e4, 1e13)
"""From a telephone line to above any card's memory."""


def read(kind: type[T], content: str, ranges: Mapping[str, Range]) -> T:
    """A `kind` from its JSON; what it does not know is left out. `ranges`: of its numbers. Raises ValueError for what
    is none, with the first value that cannot be."""
    found = bounded_json(content, float)
    if not isinstance(found, dict):
        raise ValueError("it is no table of values")
    hints, values = get_type_hints(kind), {}
    for field in fields(kind):  # type: ignore[arg-type]  # T is a dataclass
        if field.name in found:
            values[field.name] = _checked(field.name, found[field.name], hints[field.name], ranges)
        elif field.default is MISSING:
            raise ValueError(f"it lacks {field.name}")
    return kind(**values)


def _checked(name: str, value: Any, hint: Any, ranges: Mapping[str, Range]) -> Any:
    allowed = get_args(hint) or (hint,)
    if value is None and type(None) in allowed:
        return None
    if hint == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise ValueError(f"{name} is {value!r:.60}, and no list of names")
    if str in allowed:
        if isinstance(value, str):
            return value
        raise ValueError(f"{name} is {value!r:.60}, and no text")
    least, most = ranges.get(name, ANY)
    number = int if int in allowed else int | float
    if isinstance(value, bool) or not isinstance(value, number) or not least <= value <= most:
        bounds = "above 0" if (least, most) == ANY else f"from {least:g} to {most:g}"
        raise ValueError(f"{name} is {value!r:.60}, and has to be a number {bounds}")
    return value
