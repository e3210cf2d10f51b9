"""What identifies a cluster: tags on the cloud's things, which are its only state, and this machine's files about it.

Whoever may tag can write anything there, so a value counts only where it is a sensible one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from inventory.cloud.values import CLUSTER_TAG, Price
from inventory.setting_types import CLUSTER_NAME
from inventory.state import state_folder

INTENT_TAG = "spotune:intent"
"""The token of the call that made a thing: says after a crash whether the call was heard."""
OWNER_TAG = "spotune:owner"
"""Whose a thing is: the fingerprint of the ssh key that its maker's machines take, a blank, and the maker's name."""
PRICE_TAG = "spotune:price"
"""On a machine: what an hour of it cost when it was ordered, its disks included."""
MOST_TAG = "spotune:price-most"
"""On a machine: what an hour of it can cost at most, its disks included: by its spot limit, or the list price."""
CURRENCY_TAG = "spotune:currency"
NODE_TAG = "spotune:node"
"""On a data disk: whose it is (te1). One order makes several machines, and its disks all get the same name."""
STATE_TAG = "spotune:state"
"""On a data disk made by itself: whether a machine ever had it."""
NEW, USED = "new", "used"
WRITTEN_TAG = "spotune:written-gib"
"""On a snapshot: what the file system said was used when it was taken."""
DISK_TAG = "spotune:disk"
"""On a machine: APART where its data disk is not part of its order."""
APART = "apart"
PLANNED_TAG = "spotune:planned"
"""On a machine: when it was to be released before it idled."""
KEPT_TAG = "spotune:kept"
"""On a machine: which other one keeps it, and until when it said so last (inventory/renting/keeper.py)."""
_MOMENT = "%Y-%m-%dT%H:%M:%SZ"
_LARGEST = 1e6
"""Beyond any price of an hour, and any disk in GiB."""


def of_cluster(name: str) -> dict[str, str]:
    """The tag everything of a cluster has."""
    return {CLUSTER_TAG: name}


def given_to(tags: Mapping[str, str], cluster: str) -> str:
    """The other cluster that a thing of `cluster` was given to; empty where its tag names none."""
    name = tags.get(CLUSTER_TAG, "")
    return name if name != cluster and re.fullmatch(CLUSTER_NAME, name) else ""


def is_lost(tags: Mapping[str, str], cluster: str) -> bool:
    """Whether a thing of `cluster` has its tag no more, and no other cluster's."""
    return tags.get(CLUSTER_TAG) != cluster and not given_to(tags, cluster)


def of_machines(name: str, price: Price | None, most_h: float = 0) -> dict[str, str]:
    """What an order's machines and disks are tagged with; the order's token comes on top."""
    tags = of_cluster(name)
    if price is not None:
        tags |= {PRICE_TAG: f"{price.trade:.4f}", CURRENCY_TAG: price.currency}
        tags |= {MOST_TAG: f"{most_h:.4f}"} if most_h > price.trade else {}
    return tags


def price_h(tags: Mapping[str, str]) -> float | None:
    """What an hour of a machine cost when it was ordered; None where no tag says so: no machine is free."""
    return number(tags, PRICE_TAG) or None


def most_h(tags: Mapping[str, str]) -> float | None:
    """What an hour of a machine can cost at most, wherever spot prices go; None where no tag says so."""
    return number(tags, MOST_TAG) or price_h(tags)


def number(tags: Mapping[str, str], key: str) -> float | None:
    """What a tag says; None where there is none, or it is no amount: finite, from 0 on, and not absurd."""
    try:
        amount = float(tags[key])
    except (KeyError, ValueError):
        return None
    return amount if 0 <= amount <= _LARGEST else None


def moment(at: datetime) -> str:
    """A time as a tag has it."""
    return at.astimezone(UTC).strftime(_MOMENT)


def moment_of(tags: Mapping[str, str], key: str) -> datetime | None:
    """The time that a tag says; None where there is none, or it is no time."""
    try:
        return datetime.strptime(tags[key], _MOMENT).replace(tzinfo=UTC)
    except (KeyError, ValueError):
        return None


def not_usable(tags: Mapping[str, str]) -> Iterator[str]:
    """The tags of a thing that say no price, amount or time, as `spotune:price = 'inf'`: they count as if they were not
    there."""
    values = {
        PRICE_TAG: price_h(tags),
        MOST_TAG: number(tags, MOST_TAG) or None,
        WRITTEN_TAG: number(tags, WRITTEN_TAG),
        PLANNED_TAG: moment_of(tags, PLANNED_TAG),
    }
    for key, value in values.items():
        if key in tags and value is None:
            yield f"{key} = {tags[key][:40]!r}"


@dataclass(frozen=True)
class StateFiles:
    """Paths of one cluster. All of it can be lost: what there is says the cloud."""

    folder: Path

    @classmethod
    def of(cls, cluster: str) -> StateFiles:
        """The files of the cluster with this name, for the current user."""
        return cls(clusters_folder() / cluster)

    @staticmethod
    def clusters() -> list[str]:
        """The names of all clusters that were rented from here."""
        return sorted(each.parent.name for each in clusters_folder().glob("*/ledger.jsonl"))

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


def clusters_folder() -> Path:
    return state_folder() / "clusters"
