"""JSON as people write it, read without what Python's reader would let through, and what its values are. Pure."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from training.data.sample import BadRecord


def json_value(content: bytes) -> Any:
    """The value of a JSON text, or the BadRecord that says why it has none."""
    try:
        return DECODER.decode(content.decode("utf-8"))
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


DECODER = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=_unique)
"""Refuses what is no JSON, and objects with a key twice. Raises ValueError."""


def parsed(text: str, what: str) -> Any:
    """The value of JSON that stands in a text of a record. Raises BadRecord, as the others below; `what` it is."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{what}: not JSON: {error}") from error
    refuse_unsound(value, what)
    return value


def text_of(value: Any, what: str) -> str:
    """The value, which must be text."""
    if not isinstance(value, str):
        raise BadRecord(f"{what} must be text, found {kind_of(value)}")
    return value


def worded(value: Any, what: str) -> str:
    """The value, which must be text with something in it."""
    if not text_of(value, what).strip():
        raise BadRecord(f"{what} is empty")
    return str(value)


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    return {type(None): "null", dict: "object", str: "text", bool: "true or false", int: "number"}.get(
        type(value), type(value).__name__
    )


def cleaned(value: Any) -> Any:
    """A value of any reader as JSON has it: an object without its nulls, as Arrow fills every object of a column up
    with the keys of all others; a map of Parquet as an object; bytes as the text they are."""
    if isinstance(value, dict):
        return {str(key): cleaned(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        is_map = bool(value) and all(isinstance(inner, tuple) and len(inner) == 2 for inner in value)
        return cleaned(dict(value)) if is_map else [cleaned(inner) for inner in value]
    with suppress(UnicodeDecodeError):
        return value.decode() if isinstance(value, bytes) else value
    return value


def refuse_unsound(value: Any, where: str) -> None:
    """Texts that no tokenizer should see, anywhere in the record."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadRecord(f"{where or 'the text'} holds a NUL character")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise BadRecord(f"{where or 'the text'} holds half of a surrogate pair, or bytes that are not UTF-8")
    elif isinstance(value, dict):
        for key, inner in value.items():
            refuse_unsound(key, f"a key of {where or 'the record'}")
            refuse_unsound(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for place, inner in enumerate(value, start=1):
            refuse_unsound(inner, f"{where} {place}".strip())
