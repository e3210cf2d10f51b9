"""A cluster.toml of the cloud in memory (memory_cloud.py)."""

from typing import ClassVar, Literal

from inventory.rental_settings import Rental
from inventory.settings import Settings


class MemoryTable(Rental):
    """[memory]"""

    table: ClassVar[str] = "memory"
    region: str = "nowhere-1"
    types: tuple[str, ...] = ("small", "large")
    image: str = "system"
    disk_category: str = "disk"
    data_disk_gib: int = 40
    ssh_from: tuple[str, ...] = ("203.0.113.9",)


class MemorySettings(Settings):
    """A cluster.toml of this cloud."""

    provider: Literal["memory"] = "memory"
    memory: MemoryTable = MemoryTable()

    @property
    def is_rented(self):
        return True
