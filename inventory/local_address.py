"""Where local clouds answer. A local cloud writes its address into a file while it runs; its clients read it here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from inventory.state import state_folder
from training.text.files import is_alive

CREDENTIALS, ADDRESS = "credentials.ini", "api.json"
"""Files in a cloud's folder: its access key, and where it answers."""


def clouds() -> Path:
    """The folder of the current user's local clouds, one below it each, by name."""
    return state_folder() / "localcloud"


def any_cloud() -> bool:
    """Whether the current user has a local cloud on this machine, running or not."""
    return any(clouds().glob(f"*/{ADDRESS}"))


@dataclass(frozen=True)
class Address:
    """What a local cloud wrote when it began to answer; it may have ended since."""

    endpoint: str
    """127.0.0.1:PORT"""
    pid: int


def address(cloud: str) -> Address | None:
    """The last address of the local cloud of this name; None where there is none."""
    try:
        written = json.loads((clouds() / cloud / ADDRESS).read_text(encoding="utf-8"))
        return Address(str(written["endpoint"]), int(written["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Served:
    """A local cloud that runs."""

    host: str
    """127.0.0.1:PORT"""
    credentials: Path
    """In the form of the vendor's SDK."""


def served(cloud: str) -> Served | None:
    """Where the local cloud of this name answers; None where it does not run."""
    last = address(cloud)
    if last is None or not is_alive(str(last.pid)):
        return None
    return Served(last.endpoint, clouds() / cloud / CREDENTIALS)


def all_served() -> list[str]:
    """Names of the local clouds that run."""
    return [each.parent.name for each in sorted(clouds().glob(f"*/{ADDRESS}")) if served(each.parent.name)]
