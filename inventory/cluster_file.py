"""Values written into cluster.toml by a command, everything else in it left as it is, comments too.

What is written is read back and compared: a file that is laid out in a way this does not understand is refused, and
the sentence says what to write by hand.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inventory.settings import SettingsError, settings_in
from training.text.problems import EncodingError, text_of

Value = int | str | Sequence[str]


def set_values(path: Path, table: str, values: Mapping[str, Value]) -> tuple[str, ...]:
    """Write keys of one table; a sentence for each that was something else. Nothing is written where none was.

    Raises SettingsError where the file cannot be changed like that, or would not be valid any more.
    """
    path = path.resolve()  # a link stays one
    try:
        text = text_of(path)
    except EncodingError as error:
        raise SettingsError(str(error)) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    changed = tuple(_differences(text, table, values))
    if not changed:
        return ()
    new = with_values(text, table, values)
    settings_in(new, path)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(new, encoding="utf-8")
        shutil.copymode(path, fresh)
        fresh.replace(path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None
    return changed


def with_values(text: str, table: str, values: Mapping[str, Value]) -> str:
    """A file's text with these values of a table. Raises SettingsError where that would change anything else. Pure."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    for key, value in values.items():
        lines = _with_value(lines, table, key, value)
    new = "".join(lines)
    wanted = tomllib.loads(text)
    wanted.setdefault(table, {}).update({key: _plain(value) for key, value in values.items()})
    if not _is(new, wanted):
        by_hand = ", ".join(_spelled(key, value) for key, value in values.items())
        raise SettingsError(f"[{table}] is written in a way that cannot be changed from here; write into it: {by_hand}")
    return new


def _differences(text: str, table: str, values: Mapping[str, Value]) -> Iterator[str]:
    there = tomllib.loads(text).get(table, {})
    for key, value in values.items():
        if key not in there:
            yield f"{_spelled(key, value)} (was not said)"
        elif there[key] != _plain(value):
            yield f"{_spelled(key, value)} (was {json.dumps(there[key], ensure_ascii=False)})"


def _with_value(lines: list[str], table: str, key: str, value: Value) -> list[str]:
    body = _body(lines, table)
    if body is None:
        return [*lines, *(["\n"] if lines else []), f"[{table}]\n", f"{_spelled(key, value)}\n"]
    for at in body:
        if re.match(rf"\s*{re.escape(key)}\s*=", lines[at]) and (end := _end(lines, at)):
            return [*lines[:at], *_replaced(lines[at:end], _spelled(key, value)), *lines[end:]]
    said = [at for at in body if re.match(rf"\s*#\s*{re.escape(key)}\s*=", lines[at])]  # as a comment: that stays
    after = (said[-1] if said else body.start - 1) + 1
    return [*lines[:after], f"{_spelled(key, value)}\n", *lines[after:]]


def _body(lines: Sequence[str], table: str) -> range | None:
    """The lines after a table's header, to the next one's; None where the file has no such header."""
    header = re.compile(rf"\s*\[\s*{re.escape(table)}\s*\]\s*(#.*)?$")
    start = next((at for at, line in enumerate(lines) if header.match(line)), None)
    if start is None:
        return None
    following = (at for at in range(start + 1, len(lines)) if re.match(r"\[", lines[at]))
    return range(start + 1, next(following, len(lines)))


def _end(lines: Sequence[str], at: int) -> int:
    """Behind the last line of the value that begins at a line; 0 where none ends."""
    return next((end for end in range(at + 1, len(lines) + 1) if _read("".join(lines[at:end])) is not None), 0)


def _replaced(old: Sequence[str], new: str) -> list[str]:
    """A key's lines with another value; its comment stays where it was, those inside a list stay as comments."""
    if len(old) > 1 and any("#" in line for line in old):
        return [f"{new}\n", *(f"# {line}" for line in old)]
    line = "".join(old)
    signs = [match.start() for match in re.finditer("#", line)]
    comment = next((at for at in signs if _read(line[:at]) is not None), None)
    if comment is None:
        return [f"{new}\n"]
    column = comment - (line.rfind("\n", 0, comment) + 1)
    return [f"{new.ljust(column - 1)} {line[comment:]}"]


def _read(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _is(text: str, wanted: Mapping[str, Any]) -> bool:
    return _read(text) == wanted


def _plain(value: Value) -> Any:
    return value if isinstance(value, int | str) else list(value)


def _spelled(key: str, value: Value) -> str:
    """For what a key here can hold JSON's spelling is TOML's too."""
    return f"{key} = {json.dumps(_plain(value), ensure_ascii=False)}"
