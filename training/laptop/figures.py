"""Numbers as tables and JSON show them; what is not known is a dash, or null. Pure."""

from __future__ import annotations

from math import isfinite
from typing import Any

from training.counting import size_text

NONE = "-"


def duration(minutes: float | None) -> str:
    """Minutes as a table shows them."""
    if minutes is None:
        return NONE
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def figure(value: float | None, how: str) -> str:
    """A number as a table shows it, or that it is not known."""
    return NONE if value is None else format(value, how)


def finite(value: Any) -> Any:
    """With null for every number that is none: for JSON."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def size(amount_bytes: int | None) -> str:
    """Bytes as a table shows them."""
    return NONE if amount_bytes is None else size_text(amount_bytes)
