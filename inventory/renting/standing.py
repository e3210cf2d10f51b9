"""The machines of a cluster as a command works on them; where there are none, a sentence that says what brings them."""

from __future__ import annotations

from contextlib import suppress

from inventory.cloud.errors import CloudError
from inventory.cloud.port import Cloud
from inventory.nodes import Node
from inventory.renting import elsewhere, members, tags
from inventory.renting.way_back import WayBack, way_back
from inventory.setting_types import SettingsError
from inventory.settings import Settings


def rented_nodes(cloud: Cloud, settings: Settings) -> tuple[Node, ...]:
    """The cluster's machines, in rank order. Raises CloudError, and SettingsError where there are none or no te1.

    The head is te1 or nothing: runs and checkpoints are on its disk, and a worker's may be of another day.
    """
    wanted = tags.of_cluster(settings.name)
    there = members.present(cloud.instances(tags=wanted))
    if not there:
        raise SettingsError(_no_machines(cloud, settings))
    if members.number(there[0]) != 1:
        rest = ", ".join(members.names(there))
        raise SettingsError(
            f"te1, the head of {settings.name!r}, is missing in {cloud.region_id} (there: {rest}): fab rebuild"
        )
    return members.as_nodes(settings, there, cloud.disks(tags=wanted))


def _no_machines(cloud: Cloud, settings: Settings) -> str:
    """That there are none, with what they can come back from and what is billed elsewhere; that they are missing is
    known without that, too."""
    left = WayBack()
    beside = elsewhere.lines(cloud, settings)
    with suppress(CloudError):
        left = way_back(cloud, settings)
    none = f"the cluster {settings.name!r} has no machines in {cloud.region_id}; {left.without_machines()}"
    return "\n".join((none, *beside))
