"""Where local clouds answer. A local cloud writes its address into a file while it runs; its clients read it here."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CREDENTIALS, ADDRESS = "credentials.ini", "api.json"
"""Files in a cloud's folder: its access key, and where it answers."""


def clouds() -> Path:
    """The folder of the current user's local clouds, one below it each, by name."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "spotune" / "localcloud"


def any_cloud() -> bool:
    """Whether the current user has a local cloud on this machine, running or not."""
    return any(clouds().glob(f"*/{ADDRESS}"))


@dataclass(frozen=True)
class Served:
    """A local cloud that runs."""

    host: str
    """127.0.0.1:PORT"""
    credentials: Path
    """In the form of the vendor's SDK."""


def served(cloud: str) -> Served | None:
    """Where the local cloud of this name answers; None where it does not run."""
    folder = clouds() / cloud
    try:
        written: Any = json.loads((folder / ADDRESS).read_text(encoding="utf-8"))
        with suppress(PermissionError):  # somebody else's process, but there
            os.kill(int(written["pid"]), 0)
        return Served(str(written["endpoint"]).removeprefix("http://"), folder / CREDENTIALS)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def all_served() -> list[str]:
    """Names of the local clouds that run."""
    return [each.parent.name for each in sorted(clouds().glob(f"*/{ADDRESS}")) if served(each.parent.name)]
