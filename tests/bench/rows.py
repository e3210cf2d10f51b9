"""Rows of the benchmark: measured one by one, each written down before the next one begins.

A row is {name, ours, peer, ratio, unit, runs, took_s}, or {name, failed, took_s} where it could not be measured.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Measure = Callable[[], Row]


@dataclass(frozen=True)
class Group:
    """Rows that stand on the same ground."""

    names: Sequence[str]
    ready: Callable[[Path], AbstractContextManager[Mapping[str, Measure]]]
    """Gets the ground ready in a folder, gives what measures each row, and clears up."""


class CommandFailed(Exception):
    """A command ended with another code than 0; the message has the end of what it said."""


def checked(done: subprocess.CompletedProcess[str]) -> str:
    """What a finished command said. Raises CommandFailed."""
    if done.returncode:
        words = done.args if isinstance(done.args, str) else " ".join(map(str, done.args))
        raise CommandFailed(f"{words} ended with {done.returncode}:\n{(done.stdout or '')[-3000:]}{done.stderr or ''}")
    return done.stdout


def measure(groups: Sequence[Group], wanted: Sequence[str], out: Path) -> list[Row]:
    """The wanted rows, all without a name; what fails costs itself. `out` holds after every row those there are."""
    results: list[Row] = []

    def note(row: Row) -> None:
        results.append(row)
        fresh = out.with_suffix(".new")
        fresh.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        fresh.replace(out)
        print(f"{row['name']}: {row.get('ratio', 'failed')} ({row['took_s']} s)", flush=True)

    out.unlink(missing_ok=True)
    for group in groups:
        if names := [name for name in group.names if not wanted or name in wanted]:
            _measure_group(group, names, note)
    return results


def _measure_group(group: Group, names: Sequence[str], note: Callable[[Row], None]) -> None:
    began, left = time.monotonic(), list(names)
    try:
        with tempfile.TemporaryDirectory() as folder, group.ready(Path(folder)) as measures:
            while left:
                note(_attempt(left[0], measures[left[0]]))
                del left[0]
    except Exception as error:  # whatever it is, the other groups are measured
        for name in left or [f"clearing up after {names[-1]}"]:
            note(_failed(name, error, began))


def _attempt(name: str, take: Measure) -> Row:
    began = time.monotonic()
    try:
        return {"name": name, **take(), "took_s": round(time.monotonic() - began)}
    except Exception as error:  # whatever it is, the other rows are measured
        return _failed(name, error, began)


def _failed(name: str, error: Exception, began: float) -> Row:
    print("".join(traceback.format_exception(error)), flush=True)
    reason = f"{type(error).__name__}: {error}".strip()
    return {"name": name, "failed": reason, "took_s": round(time.monotonic() - began)}


def compared(pairs: Sequence[tuple[float, float]], digits: int = 3) -> Row:
    """(ours, the peer's) in seconds, as a row: medians, and the median of the ratios pair by pair."""
    return {
        "ours": round(statistics.median(a for a, _ in pairs), digits),
        "peer": round(statistics.median(b for _, b in pairs), digits),
        "ratio": round(statistics.median(b / a for a, b in pairs), 2),
        "unit": "s",
        "runs": len(pairs),
    }


def paired(ours: Callable[[], float], peer: Callable[[], float], runs: int) -> Row:
    """Ours and the peer in turn, each once to warm up and `runs` times to count; both return seconds."""
    ours(), peer()
    return compared([(ours(), peer()) for _ in range(runs)])


def show(results: Sequence[Row], revision: str) -> None:
    """The table a person reads, and below it what failed."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="ratio > 1: we are ahead")
    columns = ("name", "ours", "peer", "ratio", "unit", "runs", "took_s")
    for column in columns:
        table.add_column(column)
    for row in results:
        table.add_row(*(str(row.get(column, "failed" if column == "ratio" else "")) for column in columns))
    console = Console()
    console.print(table)
    for row in results:
        for part, value in row.get("parts", {}).items():
            console.print(f"  {row['name']}: {part}: {value}")
    for row in results:
        if "failed" in row:
            console.print(f"failed: {row['name']}: {escape(row['failed'])}", style="red")
    console.print(f"at {revision}; written to bench.json")
