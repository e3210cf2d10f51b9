"""What is billed, and is in no list of this cluster's region: left in another region or account, or under another name
in cluster.toml. `fab status`, `up`, `doctor`, `train`, `cost` and `down` say the same of it, a line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from inventory.cloud.errors import CloudError, RentError
from inventory.cloud.port import Cloud
from inventory.renting import members, tags
from inventory.renting.ledger import Entry, Ledger, billed_alone, holdings
from inventory.renting.members import Existing
from inventory.renting.tags import StateFiles
from inventory.settings import Settings
from inventory.shown import clock


@dataclass(frozen=True)
class Left:
    """One machine, disk or snapshot, and the cluster it is of."""

    cluster: str
    entry: Entry
    is_renamed: bool = False
    """Whether cluster.toml says another name now."""

    @property
    def line(self) -> str:
        """What it is, until when it is billed, and what to write into cluster.toml to get at it."""
        each = self.entry
        until = f" until {clock(each.release_at)} at least" if each.release_at else ""
        how = f'with region = "{each.region}"' + (f' and name = "{self.cluster}"' if self.is_renamed else "")
        key = "" if self.is_renamed or not each.account else " and that account's key"
        name = members.short(each.name, self.cluster) or each.instance_type
        whose = f", of the cluster {self.cluster!r}" if self.is_renamed else ""
        return (
            f"elsewhere  {name}  {each.instance_id}  {each.instance_type}  in {each.where.words}{whose}: "
            f"billed{until}; look, and remove it, {how} in cluster.toml{key}"
        )


def billed_elsewhere(cloud: Cloud, settings: Settings) -> tuple[Left, ...]:
    """Asked for by its id where this account's key reaches: what is gone there ends in its ledger."""
    book, now = Ledger.of(cloud, settings), cloud.now()
    billed = [Left(settings.name, each) for each in _still(cloud, book, book.elsewhere(now))]
    if settings.on_this_machine:  # each name has a cloud of its own here, and nothing is billed
        return tuple(billed)
    own = {key for key, each in book.read().items() if each.ended is None}
    for name in StateFiles.clusters():
        if name != settings.name and cloud.account:
            other = Ledger.named(cloud, name)
            entries = [each for each in other.open_in_account(now) if each.instance_id not in own]
            billed += [Left(name, each, is_renamed=True) for each in _still(cloud, other, entries)]
    return tuple(billed)


def other_billing(cloud: Cloud, settings: Settings, listed: Existing | None = None) -> tuple[str, ...]:
    """What is billed beside the machines that a command works on, a line each: elsewhere, and here without a tag. Why
    that is not known stands for it where the cloud does not tell. `listed`: as `holdings` has it."""
    try:
        own = holdings(cloud, settings, listed)
        return *own.notes, *own.elsewhere, *(each.line for each in billed_elsewhere(cloud, settings))
    except CloudError as error:
        return (f"what else is billed is not known: {error}",)


def _still(cloud: Cloud, book: Ledger, entries: Sequence[Entry]) -> Iterator[Entry]:
    """Those that are there, or that nobody can be asked of."""
    for region in dict.fromkeys(each.region for each in entries):
        of_region = [each for each in entries if each.region == region]
        reachable = [each for each in of_region if each.account == cloud.account != ""]
        gone: list[Entry] = []
        with suppress(CloudError, RentError):  # it cannot be asked: what was seen there last stands
            regional_cloud = cloud if region == cloud.region_id else cloud.in_region(region)
            for listed in (regional_cloud.instances, regional_cloud.disks, regional_cloud.snapshots):
                listed(tags=tags.of_cluster(book.cluster))  # refuses a key that may not see what is there
            ids = billed_alone(replace(book, cloud=regional_cloud).still_there(reachable))
            gone = [each for each in reachable if each.instance_id not in ids]
        now = cloud.now()
        book.append(replace(each, ended=min(now, each.release_at or now)) for each in gone)
        yield from (each for each in of_region if each not in gone)
