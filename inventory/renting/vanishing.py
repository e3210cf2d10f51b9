"""Machines that the cloud takes back while something is being done with them: the error then says that, not how it
showed first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inventory.cloud.errors import CloudError, Kind
from inventory.renting import members

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.cloud.values import Instance


@contextmanager
def told(cloud: Cloud, machines: Sequence[Instance]) -> Iterator[None]:
    """Where what is inside fails, of the cloud, of ssh or else, and one of the machines is gone, that is the error.

    Raises CloudError naming the machines that are gone; else what was raised inside.
    """
    try:
        yield
    except RuntimeError as error:
        refuse_gone(machines, _still(cloud, machines), error)
        raise


def refuse_gone(machines: Sequence[Instance], there: Sequence[Instance], cause: Exception | None = None) -> None:
    """Raises CloudError where one of the machines is not among those that are there. Pure."""
    ids = {each.instance_id for each in there}
    gone = [each for each in members.members(machines) if each.instance_id not in ids]
    if gone:
        names = ", ".join(members.names(gone))
        raise CloudError(
            f"{names} went meanwhile (a spot machine is taken back at any time); run the same command again",
            Kind.PASSING,
        ) from cause


def _still(cloud: Cloud, machines: Sequence[Instance]) -> Sequence[Instance]:
    try:
        return cloud.instances(ids=[each.instance_id for each in machines])
    except CloudError:  # then the first error is the one to tell
        return machines
