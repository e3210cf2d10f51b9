"""What a cluster has and had: by the cloud's lists, and by what this machine wrote down when it last looked.

The cloud forgets what past machines cost and, asked in one region, tells nothing of another. An entry ends only after
the cloud was asked for its id: a machine that lost its tag is in no list of the cluster and is still billed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from inventory.cloud.port import Cloud
from inventory.cloud.values import CLUSTER_TAG, Disk, Instance, Snapshot
from inventory.renting import tags
from inventory.renting.members import Existing, existing
from inventory.renting.tags import StateFiles
from inventory.settings import Settings

MACHINE, DISK, SNAPSHOT = "machine", "disk", "snapshot"
Thing = Instance | Disk | Snapshot


@dataclass(frozen=True)
class Where:
    """A region of an account: what one look at the cloud shows."""

    region: str = ""
    account: str = ""
    """Empty: not told."""

    def has(self, entry: Entry) -> bool:
        """Whether an entry can be of here; one that was written before it said so can."""
        same_account = not (entry.account and self.account) or entry.account == self.account
        return same_account and (not (entry.region and self.region) or entry.region == self.region)

    @property
    def words(self) -> str:
        return f"{self.region}{f' of account {self.account}' if self.account else ''}"


@dataclass(frozen=True)
class Entry:
    """One machine, kept disk or snapshot, as last seen."""

    instance_id: str
    name: str
    instance_type: str
    created: datetime
    price_h: float
    currency: str
    release_at: datetime | None = None
    ended: datetime | None = None
    """When it was gone, or at the latest can have been; None while it is there."""
    region: str = ""
    account: str = ""
    kind: str = MACHINE

    @property
    def where(self) -> Where:
        return Where(self.region, self.account)


def parsed(text: str) -> dict[str, Entry]:
    """The entries by machine. A line that was cut off by a crash is left out."""
    entries = {}
    for line in text.splitlines():
        try:
            entry = _entry(json.loads(line))
        except (ValueError, TypeError, KeyError):
            continue
        entries[entry.instance_id] = entry
    return entries


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


def changes(known: Mapping[str, Entry], seen: Iterable[Entry], now: datetime) -> Iterable[Entry]:
    """What to write after a look at the cloud: what is new, other release times, and what is gone. Pure.

    One that is gone ended at the latest now, and at the latest when it was to be released.
    """
    current = {entry.instance_id: entry for entry in seen}
    for instance_id, entry in current.items():
        if known.get(instance_id) != entry:
            yield entry
    for entry in known.values():
        if entry.ended is None and entry.instance_id not in current:
            yield replace(entry, ended=min(now, entry.release_at or now))


def _seen(instance: Instance, here: Where) -> Entry:
    return Entry(
        instance.instance_id,
        instance.name,
        instance.instance_type,
        instance.created,
        tags.price_h(instance.tags) or 0.0,
        instance.tags.get(tags.CURRENCY_TAG, ""),
        instance.release_at,
        region=here.region,
        account=here.account,
    )


def _kept(each: Disk | Snapshot, here: Where) -> Entry:
    if isinstance(each, Disk):
        what = f"disk of {each.size_gib} GiB"
        return Entry(each.disk_id, each.name, what, each.created, 0, "", None, None, here.region, here.account, DISK)
    key, what = each.snapshot_id, f"snapshot of {each.disk_gib} GiB"
    return Entry(key, each.name, what, each.created, 0, "", None, None, here.region, here.account, SNAPSHOT)


def stays(disks: Sequence[Disk]) -> tuple[Disk, ...]:
    """The disks that no machine takes with it."""
    return tuple(d for d in disks if not (d.instance_id and d.delete_with_instance))


@dataclass(frozen=True)
class Ledger:
    """A cluster's file, as it is read and written by who looks at the cloud from one place."""

    file: Path
    here: Where
    cloud: Cloud
    cluster: str

    @classmethod
    def of(cls, cloud: Cloud, settings: Settings) -> Ledger:
        """The ledger of a cluster; the cloud is asked once whose account it is."""
        return cls.named(cloud, settings.name)

    @classmethod
    def named(cls, cloud: Cloud, cluster: str) -> Ledger:
        """The same by the cluster's name."""
        return cls(StateFiles.of(cluster).ledger, Where(cloud.region_id, cloud.account), cloud, cluster)

    def read(self) -> dict[str, Entry]:
        """The entries by id; none where there is no file."""
        try:
            return parsed(self.file.read_text(encoding="utf-8", errors="replace"))
        except FileNotFoundError:
            return {}

    @property
    def currency(self) -> str:
        """Of the account, as prices were last told in; of another one where this one has no entry yet; empty where
        none ever was."""
        priced = [entry for entry in self.read().values() if entry.currency]
        newest = max(priced, key=lambda entry: (entry.account == self.here.account, entry.created), default=None)
        return newest.currency if newest else ""

    def past(self, now: datetime) -> tuple[Entry, ...]:
        """The machines that are gone, anywhere. One that was left elsewhere is gone when it was to be released."""
        return tuple(each for e in self.read().values() if (each := self._over(e, now)).ended and each.kind == MACHINE)

    def gone(self, ids: Collection[str], now: datetime) -> tuple[Entry, ...]:
        """`past`, and those that are no longer among the `ids` of what is there; nothing is written."""
        open_here = {i: e for i, e in self.read().items() if e.kind == MACHINE and self.here.has(e) and i not in ids}
        return (*self.past(now), *changes(open_here, (), now))

    def _over(self, entry: Entry, now: datetime) -> Entry:
        elsewhere = not (entry.ended or self.here.has(entry))
        return replace(entry, ended=entry.release_at) if elsewhere and _is_over(entry, now) else entry

    def lost(self, kind: str, ids: Collection[str]) -> tuple[Thing, ...]:
        """What was last seen here, is not among the `ids` that the cloud lists by the tag, and is there by its id."""
        return self.still_there([e for e in self._open_here(kind) if e.instance_id not in ids])

    def _open_here(self, *kinds: str) -> list[Entry]:
        return [e for e in self.read().values() if e.ended is None and e.kind in kinds and self.here.has(e)]

    def still_there(self, entries: Sequence[Entry]) -> tuple[Thing, ...]:
        """What the cloud has by the ids of these entries, whatever its tags say. Raises CloudError."""
        lists: dict[str, Callable[..., Sequence[Thing]]] = {
            MACHINE: self.cloud.instances,
            DISK: self.cloud.disks,
            SNAPSHOT: self.cloud.snapshots,
        }
        ids = {kind: [entry.instance_id for entry in entries if entry.kind == kind] for kind in lists}
        return tuple(each for kind, by_id in lists.items() if ids[kind] for each in by_id(ids=ids[kind]))

    def elsewhere(self, now: datetime) -> tuple[Entry, ...]:
        """What was left where this look does not reach, and may be billed: all but machines whose time is over."""
        left = [e for e in self.read().values() if e.ended is None and not self.here.has(e)]
        return tuple(entry for entry in left if not _is_over(entry, now))

    def open_in_account(self, now: datetime) -> tuple[Entry, ...]:
        """What was left in any region of this account, and may be billed."""
        left = [e for e in self.read().values() if e.ended is None and e.account == self.here.account]
        return tuple(entry for entry in left if not _is_over(entry, now))

    def counted(self, now: datetime) -> tuple[Entry, ...]:
        """`past`, and the machines that were left elsewhere: what is not here and counts for a budget."""
        return (*self.past(now), *(entry for entry in self.elsewhere(now) if entry.kind == MACHINE))

    def record(self, instances: Sequence[Instance], now: datetime) -> tuple[Entry, ...]:
        """Write down which machines there are here; what is `counted` beside them. Raises CloudError."""
        self._write([_seen(each, self.here) for each in instances], (MACHINE,), now)
        return self.counted(now)

    def record_kept(self, disks: Sequence[Disk], snapshots: Sequence[Snapshot] | None, now: datetime) -> None:
        """Write down what goes on costing here when the machines are gone; None: not looked at. Raises CloudError."""
        things: list[Disk | Snapshot] = [*stays(disks), *(snapshots or ())]
        seen = [_kept(each, self.here) for each in things]
        self._write(seen, (DISK,) if snapshots is None else (DISK, SNAPSHOT), now)

    def record_snapshot(self, snapshot_id: str, name: str, disk_gib: int, now: datetime) -> None:
        """Write down one that was just made: it is billed from now on, and may be in no list yet."""
        self.append([_kept(Snapshot(snapshot_id, name, "", "", disk_gib, "", 0, False, now), self.here)])

    def _write(self, seen: Sequence[Entry], kinds: Sequence[str], now: datetime) -> None:
        known = self.read()
        seen = [_completed(entry, known.get(entry.instance_id)) for entry in seen]
        ids = {entry.instance_id for entry in seen}
        of_here = {
            key: entry
            for key, entry in known.items()
            if entry.kind in kinds and self.here.has(entry) and (self.here.account or not entry.account or key in ids)
        }  # a look that does not know its account says nothing of what another account has
        missing = [entry for key, entry in of_here.items() if entry.ended is None and key not in ids]
        lost = billed_alone(self.still_there(missing))
        recent = timedelta(seconds=self.cloud.pace.listed_s)  # a snapshot may be in no list yet
        young = [e.instance_id for e in missing if e.kind == SNAPSHOT and now - e.created < recent]
        self.append(changes(of_here, [*seen, *(of_here[key] for key in {*lost, *young})], now))

    def append(self, entries: Iterable[Entry]) -> None:
        """Write entries, each in place of the one with its id."""
        if new := "".join(map(line, entries)):
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "a", encoding="utf-8") as out:
                out.write(new)


def id_of(thing: Thing) -> str:
    """By which the cloud and the ledger know it."""
    match thing:
        case Instance():
            return thing.instance_id
        case Disk():
            return thing.disk_id
        case Snapshot():
            return thing.snapshot_id


def billed_alone(things: Sequence[Thing]) -> tuple[str, ...]:
    """The ids of what is billed by itself: a disk that goes with its machine is in that one's entry."""
    return tuple(id_of(each) for each in things if not isinstance(each, Disk) or stays([each]))


def _is_over(entry: Entry, now: datetime) -> bool:
    return entry.release_at is not None and entry.release_at <= now


def _completed(entry: Entry, was: Entry | None) -> Entry:
    """What a look saw, with what an earlier one knew better: the price of an order does not change, but its tag may;
    an account may not have been told."""
    if was is None:
        return entry
    price = was if was.price_h else entry
    return replace(entry, price_h=price.price_h, currency=price.currency, account=entry.account or was.account)


# What a cluster has in one region: all that has its tag, and by its id whatever was seen here before. A tag can be
# lost or changed: in the console, by a colleague, by a policy; what it was on is billed on. A tag that is the name of
# another cluster gives a thing to that one.


@dataclass(frozen=True)
class Holdings:
    """Each with the cluster's tag, also where the cloud has it no more. What was given to another cluster is not among
    them, nor are the disks of such a machine."""

    machines: tuple[Instance, ...]
    disks: tuple[Disk, ...]
    snapshots: tuple[Snapshot, ...]
    lost: tuple[str, ...]
    """The ids of those whose tag is gone, or is no name of a cluster."""
    reassigned: Mapping[str, str]
    """What has another cluster's tag now: its id, and that cluster."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with their tags, a sentence each."""
        priced: list[Instance | Snapshot] = [*self.machines, *self.snapshots]
        notes = [
            f"{id_of(each)}: the tag {tag} is not a valid value and is ignored"
            for each in priced
            for tag in tags.not_usable(each.tags)
        ]
        if self.lost:
            notes.append(
                f"{', '.join(self.lost)}: the tag {CLUSTER_TAG} was removed or changed, but they belong to this "
                "cluster and are billed; fab down and fab snapshots.prune count them in"
            )
        return tuple(notes)

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """What was given to another cluster, a sentence each."""
        return tuple(
            f"elsewhere  {key}: its tag {CLUSTER_TAG} names the cluster {name!r} now, and it is billed; look, and "
            f'remove it, with name = "{name}" in cluster.toml'
            for key, name in self.reassigned.items()
        )


def with_tag(things: Sequence[Any], cluster: str) -> tuple[Any, ...]:
    """Those that were not given to another cluster, each with the tag of this one."""
    mine = (each for each in things if not tags.given_to(each.tags, cluster))
    return tuple(replace(each, tags={**each.tags, **tags.of_cluster(cluster)}) for each in mine)


def holdings(cloud: Cloud, settings: Settings, listed: Existing | None = None) -> Holdings:
    """Ask the cloud; of what it has `listed` already only for what is not among it, and for no snapshots. Raises
    CloudError."""
    own, book = tags.of_cluster(settings.name), Ledger.of(cloud, settings)
    lost, reassigned = list[str](), dict[str, str]()

    def whole(kind: str, tagged: Sequence[Any], beside: Sequence[Any] = ()) -> tuple[Any, ...]:
        more = {id_of(each): each for each in (*beside, *book.lost(kind, {id_of(each) for each in tagged}))}
        reassigned.update({key: name for key, each in more.items() if (name := tags.given_to(each.tags, book.cluster))})
        lost.extend(key for key, each in more.items() if tags.is_lost(each.tags, book.cluster))
        return *tagged, *with_tag(tuple(more.values()), book.cluster)

    resources = listed or existing(cloud, settings)
    machines = whole(MACHINE, resources.instances)
    theirs = [d for each in lost for d in cloud.disks(instance_id=each) if d.tags.get(CLUSTER_TAG) != book.cluster]
    disks = whole(DISK, resources.disks, theirs)
    reassigned |= {d.disk_id: reassigned[d.instance_id] for d in disks if d.instance_id in reassigned}
    snapshots = () if listed else whole(SNAPSHOT, cloud.snapshots(tags=own))
    return Holdings(
        machines, tuple(d for d in disks if d.disk_id not in reassigned), snapshots, tuple(lost), reassigned
    )
