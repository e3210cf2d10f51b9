"""Values written into cluster.toml by a command. Everything else in it stays, also comments, except those inside a list
that is replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from inventory.settings import SettingsError, settings_in
from training.text.problems import EncodingError, text_of

Value = int | str | Sequence[str]


def set_values(path: Path, table: str, values: Mapping[str, Value]) -> tuple[str, ...]:
    """Write keys of one table; a sentence for each that was something else. Nothing is written where none was.

    Raises SettingsError where the file cannot be changed, or would not be valid any more.
    """
    path = path.resolve()  # a link stays one
    try:
        file = tomlkit.parse(text_of(path))
    except EncodingError as error:
        raise SettingsError(str(error)) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    except TOMLKitError as error:
        raise SettingsError(f"{path}: {error}") from None
    plain = {key: value if isinstance(value, int | str) else list(value) for key, value in values.items()}
    changed = tuple(_differences(file.unwrap().get(table, {}), plain))
    if not changed:
        return ()
    section = file.setdefault(table, tomlkit.table())
    for key, value in plain.items():
        if key in section or not isinstance(section, Table):
            section[key] = value
        else:
            _insert(section, key, value)
    settings_in(new := tomlkit.dumps(file), path)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(new, encoding="utf-8")
        shutil.copymode(path, fresh)
        fresh.replace(path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None
    return changed


def _insert(section: Table, key: str, value: int | str | list[str]) -> None:
    """A new key: below the comment `# key = ...` where there is one, else behind the last key. What stands at a table's
    end may be the heading of the next one."""
    body = section.value.body
    commented = [i for i, (_, item) in enumerate(body) if item.as_string().startswith(f"# {key} =")]
    keys = [i for i, (name, _) in enumerate(body) if name is not None]
    place = (commented or keys or [-1])[-1] + 1
    after = body[place:]
    for name, _ in after:
        if name is not None:
            section.remove(name)
    del body[place:]
    section.append(key, value)
    for name, item in after:
        section.append(name, item)


def _differences(existing: Mapping[str, object], values: Mapping[str, object]) -> Iterator[str]:
    for key, value in values.items():
        if existing.get(key) != value:
            was = f"was {json.dumps(existing[key], ensure_ascii=False)}" if key in existing else "was not said"
            yield f"{key} = {json.dumps(value, ensure_ascii=False)} ({was})"
