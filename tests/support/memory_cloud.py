"""A cloud in memory: the whole port in one file. What is asked of the next vendor's adapter can be read here."""

import base64
import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from inventory.cloud import values
from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.pace import CallPace
from inventory.cloud.port import Ability
from inventory.cloud.values import DATA_DISK, MACHINE, Disk, Instance, NetworkRequest, Snapshot
from tests.support.amount import Amount

ZONES = ("nowhere-1a", "nowhere-1b")
PRICES_H = {"small": Amount(1.0), "large": Amount(3.0)}
"""What an hour of each type costs as a spot machine."""
DISK_GIB_H = Amount(0.001)
HOST_KEY = f"ssh-ed25519 {base64.b64encode(b'a host key').decode()} root@machine\n"


class MemoryCloud:
    """One region. All at once and at no cost: what is made is there, and listed, when the call returns."""

    region_id = "nowhere-1"
    account = "memory"
    pace = CallPace(poll_s=0.001, wait_limit_s=1, settle_s=0.01, listed_s=0.01, patience=0.001)

    def __init__(self, abilities=frozenset(Ability), sold_out=(), gpus=()):
        """`gpus`: types with GPUs that it sells besides, and what an hour of each costs as a spot machine."""
        self.gpus = {machine.name: machine for machine, _ in gpus}
        self.prices_h = PRICES_H | {machine.name: Amount(price) for machine, price in gpus}
        self.abilities, self.sold_out = abilities, set(sold_out)
        self.all = {}
        """Everything there is, by its id."""
        self.heard = {}
        """What a token made."""
        self.regions = {}
        """Other regions of the account that can be asked."""
        self.orders = []
        self._count = itertools.count(1)

    def now(self):
        return datetime.now(UTC)

    def in_region(self, region_id):
        if region_id not in self.regions:
            raise RentError(f"{region_id} cannot be asked")
        return self.regions[region_id]

    def tag(self, kind, ids, tags):
        for each in ids:
            self.all[each] = replace(self.all[each], tags={**self.all[each].tags, **tags})

    def delete(self, kind, ids, token=""):
        theirs = [each for each in self._found(Disk) if each.instance_id in ids]
        self.all |= {each.disk_id: replace(each, instance_id="", status="Available") for each in theirs}
        for each in [*ids, *(each.disk_id for each in theirs if each.delete_with_instance)]:
            self.all.pop(each, None)

    # Machines

    def instances(self, *, tags=None, ids=None):
        return self._found(Instance, tags, ids)

    def run(self, launch, token, *, attempts=None):
        if attempts:
            attempts()
        if token not in self.heard:
            if launch.instance_type in self.sold_out:
                raise CloudError(f"{launch.instance_type} is sold out", Kind.NO_STOCK, "SoldOut")
            assert len(launch.names) == 1 or Ability.ORDERED_NAMES in self.abilities
            assert (launch.release_at is not None) == (Ability.RELEASE_TIME in self.abilities)
            self.orders.append(launch)
            self.heard[token] = tuple(self._machine(launch, name) for name in launch.names)
        return self.heard[token]

    def _machine(self, launch, name):
        number = next(self._count)
        machine_id = f"i-{number}"
        where = (launch.instance_type, launch.zone_id, self.now(), f"172.16.0.{number}", f"198.51.100.{number}")
        more = {key: getattr(launch, key) for key in ("is_spot", "price_limit", "release_at", "key_pair", "tags")}
        self.all[machine_id] = Instance(machine_id, name, "Running", *where, **more)
        self._disk(launch.system_disk, launch.zone_id, launch.tags, "system", machine_id)
        for disk in launch.data_disks:
            self._disk(disk, launch.zone_id, launch.tags, "data", machine_id)
        return machine_id

    def start(self, instance_ids):
        for each in instance_ids:
            self.all[each] = replace(self.all[each], status="Running")

    def set_release_time(self, instance_id, at):
        assert Ability.RELEASE_TIME in self.abilities
        self.all[instance_id] = replace(self.all[instance_id], release_at=at)

    def host_keys(self, instance_id):
        return HOST_KEY

    # Disks

    def disks(self, *, tags=None, ids=None, instance_id=""):
        return tuple(each for each in self._found(Disk, tags, ids) if instance_id in ("", each.instance_id))

    def create_disk(self, zone_id, disk, tags, token, *, attempts=None):
        if attempts:
            attempts()
        if token not in self.heard:
            self.heard[token] = self._disk(disk, zone_id, tags or {}, "data")
        return self.heard[token]

    def _disk(self, disk, zone_id, tags, kind, instance_id=""):
        disk_id = f"d-{next(self._count)}"
        size = disk.size_gib or (self.all[disk.snapshot_id].disk_gib if disk.snapshot_id else 0)
        state = "In_use" if instance_id else "Available"
        its = (disk_id, disk_id[2:], kind, size, disk.category, state, zone_id, self.now(), disk.name)
        its += (disk.performance_level, instance_id, disk.delete_with_instance, disk.snapshot_id, tags)
        self.all[disk_id] = Disk(*its)
        return disk_id

    def attach_disk(self, disk_id, instance_id, delete_with_instance):
        more = {"instance_id": instance_id, "status": "In_use", "delete_with_instance": delete_with_instance}
        self.all[disk_id] = replace(self.all[disk_id], **more)

    # Snapshots, and the image that machines are made from

    def snapshots(self, *, tags=None, ids=None, disk_id=""):
        return tuple(each for each in self._found(Snapshot, tags, ids) if disk_id in ("", each.disk_id))

    def create_snapshot(self, disk_id, name, tags, token, *, waits=True):
        if token not in self.heard:
            disk, snapshot_id = self.all[disk_id], f"s-{next(self._count)}"
            told = (snapshot_id, name, disk_id, disk.kind, disk.size_gib, "accomplished", 100, True, self.now())
            self.all[snapshot_id] = Snapshot(*told, tags=tags or {})
            self.heard[token] = snapshot_id
        return self.heard[token]

    def image(self, name):
        return values.Image(name, 20)

    # Offers and prices

    def types(self, names=None):
        if names is None:
            return tuple(self.gpus.values())
        return tuple(self.gpus.get(name, values.InstanceType(name, 2, 8)) for name in names if name in self.prices_h)

    def stock(self, instance_type, spot):
        names = [name for name in self.prices_h if instance_type in ("", name)]
        return tuple(values.Stock(zone, name, True) for name in names for zone in ZONES)

    def spot_market(self, instance_types, hours=72, duration_h=1):
        at, places = self.now() - timedelta(minutes=5), [(zone, name) for zone in ZONES for name in instance_types]
        prices = tuple(values.SpotPrice(zone, name, at, self.prices_h[name]) for zone, name in places)
        return prices, tuple(values.SpotAdvice(zone, name, 20, 1) for zone, name in places)

    def price(self, launch):
        machine = self.prices_h[launch.instance_type]
        disks = sum(each.size_gib for each in (launch.system_disk, *launch.data_disks)) * DISK_GIB_H
        return values.Price(machine + disks, 2 * machine + disks, "EUR", {MACHINE: machine, DATA_DISK: disks})

    def disk_price_month(self, category, size_gib, performance_level, zone_id):
        month = size_gib * DISK_GIB_H * 730
        return values.Price(month, month, "EUR")

    # Who reaches the machines, with which key

    def prepare_network(self, wanted, journal):
        if wanted.key_pair:
            self.all[wanted.key_pair] = wanted
        return values.PreparedNetwork(f"sg-{wanted.cluster}", f"net-{wanted.zone_id}")

    def key_pairs(self, tags):
        return tuple(name for name, each in self.all.items() if isinstance(each, NetworkRequest))

    def _found(self, kind, tags=None, ids=None):
        """The things of a kind with all these tags and one of these ids."""
        there = [(key, each) for key, each in self.all.items() if isinstance(each, kind)]
        there = [(key, each) for key, each in there if ids is None or key in ids]
        return tuple(each for _, each in there if (tags or {}).items() <= each.tags.items())
