"""What past machines cost: the cloud forgets a machine that is gone. One line of JSON each, the last one counts.

Only `fab cost` and the budget read it; no machine or disk is ever looked for in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from inventory.api.values import Instance
from inventory.renting import tags


@dataclass(frozen=True)
class Entry:
    """One machine, as last seen."""

    instance_id: str
    name: str
    instance_type: str
    created: datetime
    price_h: float
    currency: str
    release_at: datetime | None = None
    ended: datetime | None = None
    """When it was gone, or at the latest can have been; None while it is there."""


def parsed(text: str) -> dict[str, Entry]:
    """The entries by machine. A line that was cut off by a crash is left out."""
    found = {}
    for line in text.splitlines():
        try:
            entry = _entry(json.loads(line))
        except (ValueError, TypeError, KeyError):
            continue
        found[entry.instance_id] = entry
    return found


def _entry(content: dict[str, Any]) -> Entry:
    for key in ("created", "release_at", "ended"):
        content[key] = datetime.fromisoformat(content[key]) if content[key] else None
    return Entry(**content)


def line(entry: Entry) -> str:
    """An entry as it is written."""
    content = asdict(entry)
    for key in ("created", "release_at", "ended"):
        content[key] = content[key].isoformat() if content[key] else None
    return json.dumps(content) + "\n"


def changes(known: Mapping[str, Entry], instances: Sequence[Instance], now: datetime) -> Iterable[Entry]:
    """What to write after a look at the cloud: new machines, other release times, and those that are gone.

    One that is gone ended at the latest now, and at the latest when it was to be released.
    """
    there = {i.instance_id: _seen(i) for i in instances}
    for instance_id, entry in there.items():
        if known.get(instance_id) != entry:
            yield entry
    for entry in known.values():
        if entry.ended is None and entry.instance_id not in there:
            yield replace(entry, ended=min(now, entry.release_at or now))


def _seen(instance: Instance) -> Entry:
    return Entry(
        instance.instance_id,
        instance.name,
        instance.instance_type,
        instance.created,
        tags.price_h(instance.tags) or 0.0,
        instance.tags.get(tags.CURRENCY_TAG, ""),
        instance.release_at,
    )


def read(file: Path) -> dict[str, Entry]:
    """The entries of a file; none where there is no file."""
    try:
        return parsed(file.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}


def look(file: Path, instances: Sequence[Instance], now: datetime) -> tuple[Entry, ...]:
    """Bring a ledger up to date with the machines there are; all entries of those that are gone."""
    known = read(file)
    new = tuple(changes(known, instances, now))
    if new:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as out:
            out.write("".join(line(entry) for entry in new))
    known |= {entry.instance_id: entry for entry in new}
    return tuple(entry for entry in known.values() if entry.ended)
