"""What is kept between runs on a head does not grow for ever: what nobody used for a month goes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

UNUSED_S = 30 * 24 * 3600.0


def mark_used(entry: Path) -> None:
    """It was of use just now."""
    os.utime(entry)


def half_made(entry: Path) -> Path:
    """Where this process makes an entry before it has its name."""
    return entry.with_name(f".{entry.name}.{os.getpid()}")


def drop_unused(entries: Iterable[Path]) -> None:
    """Remove the entries that were not used for a month, and the half made ones whose makers are gone."""
    for entry in entries:
        try:
            unused_s = time.time() - entry.stat().st_mtime
        except FileNotFoundError:  # another process tidies up too
            continue
        if unused_s > UNUSED_S or (entry.name.startswith(".") and not _alive(entry.suffix[1:])):
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
