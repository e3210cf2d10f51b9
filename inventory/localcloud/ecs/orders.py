"""What RunInstances asks for, checked before anything is made: every documented refusal for its documented cause."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from ipaddress import IPv4Network

from inventory.localcloud.ecs import images, names, sold, stamps
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters
from inventory.localcloud.ecs.listing import checked_tags
from inventory.localcloud.ecs.volumes import Volume, ordered_volume, system_volume
from inventory.localcloud.ecs.world import VSwitch

EARLIEST_RELEASE_S = 30 * 60
LATEST_RELEASE_S = 3 * 365 * 86_400
MOST_USER_DATA = 32 * 1024
MOST_DATA_DISKS = 16
NO_STOCK = (
    "The resource is out of stock in the specified zone. Please try other types, or choose other regions and zones."
)
SPOT = ("NoSpot", "SpotWithPriceLimit", "SpotAsPriceGo")


@dataclass(frozen=True)
class Order:
    """A request that can be met."""

    instance_type: str
    image_id: str
    image_snapshot_id: str
    vswitch: VSwitch
    security_group_ids: tuple[str, ...]
    names: tuple[str, ...]
    """Of each machine; empty: its id."""
    host_names: tuple[str, ...]
    system: Volume
    data: tuple[Volume, ...]
    spot_strategy: str
    price_limit: float
    spot_duration: int
    interruption_behavior: str
    release_at: float
    key_pair: str
    user_data: str
    http_tokens: str
    public_mbps: int
    tags: dict[str, str]


def checked(cloud: Cloud, p: Parameters) -> Order:
    """The order in a request. Raises the API's refusal of the first thing that is wrong."""
    spec = sold.spec(p.needed("InstanceType"))
    if spec is None:
        told = "The specified InstanceType does not exist or beyond the permitted range."
        raise ApiError(400, "InvalidInstanceType.ValueNotSupported", told)
    image = _image(cloud, p)
    vswitch = _vswitch(cloud, p)
    count = _count(cloud, p)
    suffix = p.flag("UniqueSuffix")
    strategy, limit = _spot(cloud, p, vswitch.zone_id)
    disks = list(p.groups("DataDisk"))
    if len(disks) > MOST_DATA_DISKS:
        raise ApiError(403, "InstanceDiskNumber.LimitExceed", "The total number of specified disk exceeds.")
    order = Order(
        instance_type=p.text("InstanceType"),
        image_id=image.image_id,
        image_snapshot_id=image.snapshot_id,
        vswitch=vswitch,
        security_group_ids=_groups(cloud, p, vswitch),
        names=tuple(names.instance_names(p.text("InstanceName"), count, suffix)),
        host_names=tuple(names.host_names(p.text("HostName"), p.strings("HostNames"), count, suffix)),
        system=system_volume(p, spec.disk_categories, image.size_gib),
        data=tuple(ordered_volume(cloud, each, spec.disk_categories) for each in disks),
        spot_strategy=strategy,
        price_limit=limit,
        spot_duration=_choice(p, "SpotDuration", ("1", "0"), "InvalidSpotDuration"),
        interruption_behavior=_behavior(p),
        release_at=release_time(cloud, p.text("AutoReleaseTime")),
        key_pair=_key_pair(cloud, p),
        user_data=_user_data(p),
        http_tokens=_http_tokens(p),
        public_mbps=_bandwidth(p),
        tags=checked_tags(p),
    )
    if not sold.in_stock(cloud, order.instance_type, vswitch.zone_id):
        raise ApiError(403, "OperationDenied.NoStock", NO_STOCK)
    return order


def _image(cloud: Cloud, p: Parameters) -> sold.Image:
    if not p.text("ImageId") and not p.text("ImageFamily"):
        raise ApiError(400, "MissingParameter.ImageId", "The input parameter ImageId that is mandatory is missing.")
    image = sold.image(cloud, p.text("ImageId"), p.text("ImageFamily"))
    if image is None:
        raise ApiError(404, "InvalidImageId.NotFound", "The specified ImageId does not exist.")
    own = cloud.world.images.get(image.image_id)
    if own and not images.is_ready(cloud, own):
        raise ApiError(403, "ImageNotReady", "The specified image is not ready.")
    return image


def _vswitch(cloud: Cloud, p: Parameters) -> VSwitch:
    vswitch = cloud.world.vswitches.get(p.needed("VSwitchId"))
    if vswitch is None:
        raise ApiError(404, "InvalidVSwitchId.NotFound", "Specified virtual switch does not exist.")
    zone = p.text("ZoneId")
    if zone and zone not in sold.zones(cloud):
        raise ApiError(404, "InvalidZoneId.NotFound", "The specified zoneId does not exist.")
    if zone and zone != vswitch.zone_id:
        raise ApiError(400, "InvalidParameter.Mismatch", "Specified virtual switch is not in the specified zone.")
    return vswitch


def _groups(cloud: Cloud, p: Parameters, vswitch: VSwitch) -> tuple[str, ...]:
    asked = p.strings("SecurityGroupIds") or [p.needed("SecurityGroupId")]
    for each in asked:
        group = cloud.world.security_groups.get(each)
        if group is None:
            told = "The SecurityGroupId provided does not exist in our records."
            raise ApiError(400, "InvalidSecurityGroupId.NotFound", told)
        if group.vpc_id != vswitch.vpc_id:
            told = "The specified security group and virtual switch are not in the same VPC."
            raise ApiError(403, "InvalidSecurityGroupId.VPCMismatch", told)
    return tuple(asked)


def _count(cloud: Cloud, p: Parameters) -> int:
    """How many machines there will be: as many as fit of Amount, at least MinAmount, which is Amount if left out."""
    amount = p.number("Amount", 1)
    least = p.number("MinAmount", amount)
    if not 1 <= amount <= 100:
        raise ApiError(403, "InvalidParam.Amount", "Amount must be between 1 and 100.")
    if not 1 <= least <= amount:
        raise ApiError(400, "InvalidMinAmount.Malformed", "The specified parameter MinAmount is not valid.")
    free = IPv4Network(cloud.subnet).num_addresses - 11 - len(cloud.world.instances)
    if free < least:
        told = "Insufficient private ip addresses in the specified VSwitch."
        raise ApiError(403, "QuotaExceeded.PrivateIpAddress", told)
    return min(amount, free)


def _spot(cloud: Cloud, p: Parameters, zone_id: str) -> tuple[str, float]:
    strategy, limit = p.text("SpotStrategy", "NoSpot"), p.decimal("SpotPriceLimit")
    if strategy not in SPOT:
        raise ApiError(400, "InvalidSpotStrategy", "The specified SpotStrategy is not valid.")
    if p.text("InstanceChargeType", "PostPaid") != "PostPaid":
        told = "The emulator sells by the hour only."
        raise ApiError(404, "InvalidInstanceChargeType.NotFound", told)
    if strategy != "SpotWithPriceLimit":
        return strategy, 0
    if limit <= 0 or round(limit, 3) != limit:
        raise ApiError(400, "InvalidSpotPriceLimit", "The specified SpotPriceLimit is not valid.")
    if limit < sold.market_price(cloud, p.text("InstanceType"), zone_id):
        told = 'The specified parameter "spotPriceLimit" can\'t be lower than current public price.'
        raise ApiError(400, "InvalidSpotPriceLimit.LowerThanPublicPrice", told)
    return strategy, limit


def _choice(p: Parameters, name: str, possible: tuple[str, ...], code: str) -> int:
    value = p.text(name, possible[0])
    if value not in possible:
        raise ApiError(400, code, f"The specified {name} is not valid.")
    return int(value)


def _behavior(p: Parameters) -> str:
    value = p.text("SpotInterruptionBehavior", "Terminate")
    if value not in ("Terminate", "Stop"):
        told = "The specified SpotInterruptionBehavior is not valid."
        raise ApiError(400, "InvalidSpotInterruptionBehavior", told)
    return value


def release_time(cloud: Cloud, text: str) -> float:
    """When a machine is to be released; 0 for never. Seconds count down to the minute. Raises ApiError."""
    if not text:
        return 0
    at = stamps.parsed(text, "AutoReleaseTime") // 60 * 60
    # The minute a request takes is not held against a caller who asks for exactly the earliest time.
    if not cloud.now() + EARLIEST_RELEASE_S <= at <= cloud.now() + LATEST_RELEASE_S:
        told = "The specified parameter AutoReleaseTime is not valid."
        raise ApiError(400, "InvalidAutoReleaseTime.Malformed", told)
    return at


def _key_pair(cloud: Cloud, p: Parameters) -> str:
    name = p.text("KeyPairName")
    if name and name not in cloud.world.key_pairs:
        told = "The specified KeyPairName does not exist in our records."
        raise ApiError(404, "InvalidKeyPair.NotFound", told)
    return name


def _user_data(p: Parameters) -> str:
    text = p.text("UserData")
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ApiError(400, "InvalidUserData.Base64FormatInvalid", "UserData must be Base64 encoded.") from None
    if len(raw) > MOST_USER_DATA:
        raise ApiError(400, "InvalidUserData.SizeExceeded", 'The specified parameter "UserData" exceeds the size.')
    return text


def _http_tokens(p: Parameters) -> str:
    value = p.text("HttpTokens", "optional")
    if value not in ("optional", "required"):
        raise ApiError(400, "InvalidParameter.HttpTokens", "The specified HttpTokens is not valid.")
    return value


def _bandwidth(p: Parameters) -> int:
    value = p.number("InternetMaxBandwidthOut")
    if not 0 <= value <= 100:
        told = "InternetMaxBandwidthOut must be between 0 and 100."
        raise ApiError(400, "InvalidInternetMaxBandwidthOut.ValueNotSupported", told)
    return value
