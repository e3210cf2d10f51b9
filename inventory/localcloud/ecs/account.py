"""Everything the emulated cloud knows, as one document that survives a restart. Changed only under the cloud's lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from inventory.localcloud.commands import LocalCloudError


class EmulatedRecord(BaseModel):
    model_config = ConfigDict(extra="ignore", validate_assignment=True)


class Resource(EmulatedRecord):
    """Something that was made and is listed. Times are seconds since 1970 of the cloud's own clock."""

    created: float
    tags: dict[str, str] = Field(default_factory=dict)


class EmulatedInstance(Resource):
    """A machine. A time of 0 means never or not set."""

    instance_id: str
    machine: str
    """What its host is called here: m1, m2, ... (at most 4 characters, as an interface name must fit)."""
    name: str
    hostname: str
    address: str
    zone_id: str
    instance_type: str
    image_id: str
    vswitch_id: str
    vpc_id: str
    security_group_ids: list[str]
    status: Literal["Pending", "Starting", "Running", "Stopping", "Stopped"] = "Pending"
    key_pair: str = ""
    spot_strategy: str = "NoSpot"
    price_limit: float = 0
    spot_duration: int = 1
    release_at: float = 0
    reclaim_at: float = 0
    """When a spot machine that was given notice goes."""
    noticed: bool = False
    public_mbps: int = 0


class EmulatedDisk(Resource):
    disk_id: str
    kind: Literal["system", "data"]
    size_gib: int
    category: str
    zone_id: str
    status: str = "Available"
    performance_level: str = ""
    name: str = ""
    instance_id: str = ""
    delete_with_instance: bool = True
    source_snapshot_id: str = ""
    was_attached: bool = False
    attached: float = 0
    detached: float = 0
    ready_at: float = 0
    """Until then it is being initialised (a fault on demand)."""

    @property
    def serial(self) -> str:
        return self.disk_id.removeprefix("d-")


class EmulatedSnapshot(Resource):
    snapshot_id: str
    name: str
    disk_id: str
    disk_kind: Literal["system", "data"]
    disk_gib: int
    category: str
    zone_id: str
    written_bytes: int
    available_at: float
    accomplished_at: float
    failed: bool = False


class EmulatedSecurityGroup(Resource):
    security_group_id: str
    name: str
    vpc_id: str
    rules: list[dict[str, str]] = Field(default_factory=list)


class EmulatedKeyPair(Resource):
    name: str
    public_key: str
    fingerprint: str


class EmulatedVpc(Resource):
    vpc_id: str
    name: str
    cidr: str


class VSwitch(Resource):
    vswitch_id: str
    vpc_id: str
    zone_id: str
    name: str
    cidr: str


class Invocation(EmulatedRecord):
    """A Cloud Assistant command on one instance."""

    invocation_id: str
    command_id: str
    instance_id: str
    created: float
    finished: float = 0
    exit_code: int | None = None
    output: str = ""
    """Base64"""
    status: str = "Running"


class Token(EmulatedRecord):
    """What a ClientToken did: the same call with it gets the same answer."""

    digest: str
    """Of the parameters, so that another request with the token is told from the same one."""
    answer: dict[str, Any]


class Account(EmulatedRecord):
    """One emulated account."""

    region_id: str = "cn-hangzhou"
    account_id: str = "1000000000000001"
    clock_offset_s: float = 0
    """How far `fab local.hurry` has put the clock forward."""
    next_machine: int = 1
    last_offset: int = 9
    """In the subnet: of the last address given out; none is used twice."""
    port: int = 0
    instances: dict[str, EmulatedInstance] = Field(default_factory=dict)
    past_instances: dict[str, EmulatedInstance] = Field(default_factory=dict)
    """Those that are gone: `release_at` is when they went."""
    disks: dict[str, EmulatedDisk] = Field(default_factory=dict)
    snapshots: dict[str, EmulatedSnapshot] = Field(default_factory=dict)
    security_groups: dict[str, EmulatedSecurityGroup] = Field(default_factory=dict)
    key_pairs: dict[str, EmulatedKeyPair] = Field(default_factory=dict)
    vpcs: dict[str, EmulatedVpc] = Field(default_factory=dict)
    vswitches: dict[str, VSwitch] = Field(default_factory=dict)
    invocations: dict[str, Invocation] = Field(default_factory=dict)
    tokens: dict[str, Token] = Field(default_factory=dict)
    hidden: dict[str, float] = Field(default_factory=dict)
    """Id -> until when no list has it (a fault on demand)."""
    unknown: dict[str, float] = Field(default_factory=dict)
    """Id, or a key pair's name -> until when no call but a list knows it (a fault on demand)."""
    nonces: dict[str, float] = Field(default_factory=dict)
    """Signature nonce -> when it was used."""
    price_factor: dict[str, float] = Field(default_factory=dict)
    """Instance type -> what its spot price was multiplied by (price moved)."""
    stocked: list[str] = Field(default_factory=list)
    """Instance types that are in stock on demand."""


def load(path: Path) -> Account:
    """The account as it was left; an empty one where there is none. Raises LocalCloudError where it is damaged."""
    try:
        return Account.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Account()
    except ValueError:
        raise LocalCloudError(f"{path} is damaged; `fab local.down` clears up") from None


def save(path: Path, account: Account) -> None:
    """Write the account in one piece."""
    half = path.with_suffix(".half")
    half.write_text(account.model_dump_json(), encoding="utf-8")
    half.replace(path)


def resources(account: Account) -> dict[str, EmulatedRecord]:
    """All that can be made, by its id; a key pair by its name."""
    some = (
        account.instances,
        account.disks,
        account.snapshots,
        account.security_groups,
        account.key_pairs,
        account.vpcs,
    )
    return {key: each for kind in (*some, account.vswitches) for key, each in kind.items()}
