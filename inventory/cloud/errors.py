"""What can go wrong with a cloud, by class: what to do about it follows from the class alone. Pure."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum

from inventory.errors import USER_MISTAKE, InventoryError


class Kind(Enum):
    """The classes of the API's errors. Codes come and go between versions; the classes stay."""

    THROTTLED = "throttled"
    """Too many calls: wait as long as it says, then the same call."""
    PASSING = "passing"
    """5xx, time-outs, cut connections, conflicts: the same call again, with the same token."""
    WAIT = "wait"
    """The thing is not ready: poll."""
    NO_STOCK = "no stock"
    """The next type or zone."""
    PRICE = "price"
    DISK_KIND = "disk kind"
    QUOTA = "quota"
    """The account may not have more of this: of another type, or in another zone, it may."""
    MONEY = "money"
    """Balance, real-name authentication, locks: the user's to see to in the console."""
    AUTH = "auth"
    NOT_FOUND = "not found"
    INPUT = "input"
    """The request is wrong."""
    UNKNOWN = "unknown"
    """No adapter knows what the cloud means: it was refused, and elsewhere it may not be."""


LATER = "it was not ready in time: try again in a few minutes"
"""What a user can do about WAIT."""


@dataclass(eq=False)
class CloudError(InventoryError, RuntimeError):
    """The cloud refused or did not answer; the message says what was asked, the answer, and what to do."""

    message: str
    kind: Kind
    code: str = ""
    request_id: str = ""
    _: KW_ONLY
    retry_after_s: float = 0
    """How long the cloud asks to be left alone; 0: it does not say."""
    setting: str = ""
    """Which one of the rental's settings is refused, where that is clear."""
    undecided: bool = False
    """An attempt before the one that was refused had no answer: the cloud may have done what it asked."""
    possible: tuple[str, ...] = ()
    """What would be accepted instead, where the cloud tells."""

    def __post_init__(self) -> None:
        super().__init__(self.message)


class RentError(InventoryError, ValueError):
    """What was asked cannot be rented, rebuilt or removed like that: the user's to decide; the message says how."""

    exit_code = USER_MISTAKE


class NoCloud(RentError):
    """No cloud can be asked from this machine yet: the local one does not run, or there are no credentials."""
