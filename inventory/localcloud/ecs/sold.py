"""What an order may ask for: types of machines, their disks, images, the market's price. All of it as the catalogue
and the price actions have it."""

from __future__ import annotations

from dataclasses import dataclass

from inventory.localcloud.ecs import catalogue
from inventory.localcloud.ecs.calls import Cloud
from inventory.localcloud.ecs.catalogue import FAMILIES, IMAGE_GIB, IMAGE_ID
from inventory.localcloud.ecs.offers import spot_price_now

OS_NAME = "Debian 12 64 bit"


@dataclass(frozen=True)
class Spec:
    """What a type of machine is."""

    vcpus: int
    memory_mib: int
    gpus: int = 0
    gpu_spec: str = ""
    disk_categories: tuple[str, ...] = catalogue.ESSD
    price: float = 0.5


@dataclass(frozen=True)
class Image:
    image_id: str
    size_gib: int
    os_name: str
    snapshot_id: str = ""
    """Of an image of one's own."""


def spec(instance_type: str) -> Spec | None:
    """None where there is no such type."""
    of = catalogue.TYPES.get(instance_type)
    if of is None:
        return None
    categories = catalogue.disk_categories(instance_type)
    return Spec(of.vcpus, int(of.memory_gib * 1024), of.gpus, of.gpu_spec, categories, of.price)


def image(cloud: Cloud, image_id: str, family: str) -> Image | None:
    """The image by its id or, without one, by its family; None where there is no such image."""
    if own := cloud.world.images.get(image_id):
        return Image(own.image_id, own.size_gib, OS_NAME, own.snapshot_id)
    is_known = image_id == IMAGE_ID if image_id else family in FAMILIES
    return Image(IMAGE_ID, IMAGE_GIB, OS_NAME) if is_known else None


def zones(cloud: Cloud) -> tuple[str, ...]:
    return catalogue.zones(cloud.world.region_id)


def in_stock(cloud: Cloud, instance_type: str, zone_id: str) -> bool:
    return catalogue.in_stock(instance_type, cloud.world.stocked)


def market_price(cloud: Cloud, instance_type: str, zone_id: str) -> float:
    """What an hour of a spot machine costs now."""
    return spot_price_now(cloud, instance_type, zone_id)
