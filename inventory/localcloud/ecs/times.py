"""Times as the API writes them: UTC, machines to the minute, disks and snapshots to the second. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from inventory.localcloud.ecs.actions import ApiError

MINUTE = "%Y-%m-%dT%H:%MZ"
SECOND = "%Y-%m-%dT%H:%M:%SZ"
NEVER_OF_A_MACHINE = "2099-12-31T15:59Z"
NEVER_OF_A_DISK = "2999-09-08T16:00Z"


def minute(at: float) -> str:
    """As of an instance; empty for 0."""
    return datetime.fromtimestamp(at, UTC).strftime(MINUTE) if at else ""


def second(at: float) -> str:
    """As of a disk or a snapshot; empty for 0."""
    return datetime.fromtimestamp(at, UTC).strftime(SECOND) if at else ""


def parsed(text: str, parameter: str) -> float:
    """Seconds since 1970 of a time in a request. Raises ApiError naming the parameter."""
    try:
        return datetime.strptime(text, SECOND).replace(tzinfo=UTC).timestamp()
    except ValueError:
        told = f"The specified parameter {parameter} is not valid."
        raise ApiError(400, f"Invalid{parameter}.Malformed", told) from None
