"""Where this machine keeps what belongs to a rented cluster: whom to trust, with which key, what it has cost."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StateFiles:
    """Paths of one cluster. All of it can be lost: what there is says the cloud."""

    folder: Path

    @classmethod
    def of(cls, cluster: str) -> StateFiles:
        """The files of the cluster with this name, for the current user."""
        return cls(_clusters() / cluster)

    @staticmethod
    def clusters() -> list[str]:
        """The names of all clusters that were rented from here."""
        return sorted(each.parent.name for each in _clusters().glob("*/ledger.jsonl"))

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def own_key(self) -> Path:
        """The private key made here where the settings' own does not exist."""
        return self.folder / "id_rsa"

    @property
    def intents(self) -> Path:
        return self.folder / "intents.json"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def phases(self) -> Path:
        """Where the seconds of the last rebuild went."""
        return self.folder / "rebuild.json"

    def make(self) -> None:
        """The folder, readable by its owner alone."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _clusters() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "spotune" / "clusters"
