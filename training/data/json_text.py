"""JSON as people write it, read without what Python's reader would let through. Pure."""

from __future__ import annotations

import json
from typing import Any

from training.data.sample import BadRecord


def json_value(content: bytes) -> Any:
    """The value of a JSON text, or the BadRecord that says why it has none."""
    try:
        return json.loads(content.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        return BadRecord(f"not UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return BadRecord(f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}")
    except (RecursionError, MemoryError):
        return BadRecord("nested too deeply")
    except ValueError as error:  # a number of more digits than Python turns into one, and our own
        return BadRecord(f"not JSON: {error}")


def refuse_constant(name: str) -> Any:
    """For `json.loads`, which would take NaN and Infinity."""
    raise ValueError(f"{name} is no JSON value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of two equal keys JSON would silently keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found
