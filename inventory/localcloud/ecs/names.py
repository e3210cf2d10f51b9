"""What several machines of one order are called: ordered names and suffixes, as the vendor documents them. Pure."""

from __future__ import annotations

import re

from inventory.localcloud.ecs.calls import ApiError

ORDERED = re.compile(r"(?P<prefix>[^\[\]]+)\[(?P<begin>\d*)(?:,(?P<bits>\d*))?\](?P<suffix>[^\[\]]*)")
USUAL_BITS, MOST_BITS, LAST_NUMBER = 6, 6, 999_999
INSTANCE_NAME = re.compile(r"(?!https?://)[^\W\d_][\w.:\-\[\],]{1,127}")
HOST_NAME = re.compile(r"(?=.{2,64}$)[A-Za-z0-9]+(?:[.-][A-Za-z0-9]+)*")


def names(pattern: str, count: int, unique_suffix: bool) -> list[str]:
    """The name of each of `count` machines.

    `name[begin,bits]suffix` numbers them with at least `bits` digits, 1 to 6. Fewer bits than `begin` has digits, or
    none, count as 6; so do bits that are left out. `unique_suffix` appends 001, 002, ... unless an ordered name
    ends with its number.
    """
    match = ORDERED.fullmatch(pattern)
    if not match:
        return _suffixed([pattern] * count, unique_suffix and count > 1)
    begin = int(match["begin"] or 0)
    if begin > LAST_NUMBER:
        raise ApiError(400, "InvalidInstanceName.Malformed", 'The specified parameter "InstanceName" is not valid.')
    bits = int(match["bits"] or USUAL_BITS)
    if not len(str(begin)) <= bits <= MOST_BITS:
        bits = USUAL_BITS
    ordered = [f"{match['prefix']}{number:0{bits}}{match['suffix']}" for number in range(begin, begin + count)]
    return _suffixed(ordered, unique_suffix and bool(match["suffix"]) and count > 1)


def _suffixed(plain: list[str], wanted: bool) -> list[str]:
    return [f"{name}{number:03}" for number, name in enumerate(plain, 1)] if wanted else plain


def instance_names(pattern: str, count: int, unique_suffix: bool) -> list[str]:
    """Raises ApiError where the name is not one."""
    if pattern and not INSTANCE_NAME.fullmatch(pattern):
        raise ApiError(400, "InvalidInstanceName.Malformed", 'The specified parameter "InstanceName" is not valid.')
    return names(pattern, count, unique_suffix and bool(pattern))


def host_names(pattern: str, each: list[str], count: int, unique_suffix: bool) -> list[str]:
    """Empty strings for machines that are to be called after their id. Raises ApiError where a name is not one."""
    if pattern and each:
        raise ApiError(400, "InvalidParameter.Conflict", "HostName and HostNames cannot be used at the same time.")
    found = each or names(pattern, count, unique_suffix and bool(pattern))
    found = [*found, *[""] * count][:count]
    if any(name and not HOST_NAME.fullmatch(name) for name in found):
        raise ApiError(400, "InvalidHostName.Malformed", 'The specified parameter "HostName" is not valid.')
    return found
