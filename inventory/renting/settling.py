"""After a crash: did the cloud hear the order nobody saw the answer of? Its tags say so, a while later."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from inventory.renting import tags
from inventory.renting.intents import Intent, Intents

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud

MACHINES, DISK, DELETION = "machines", "disk", "deletion"
"""What an intent's key begins with, where a thing with a price is made or removed."""


def settle(cloud: Cloud, intents: Intents) -> tuple[str, ...]:
    """Wait until every order that was begun and never ended shows up, or is old enough to never have been heard.

    Afterwards the lists of machines and disks are the whole truth, and no such intent is left. Returns a sentence
    for each order that was heard. Raises RentError where another command is just ordering.
    """
    if not _unsettled(intents):
        return ()
    with intents.alone():
        return settle_alone(cloud, intents)


def settle_alone(cloud: Cloud, intents: Intents) -> tuple[str, ...]:
    """`settle` for a command that holds the cluster already."""
    said = []
    for key, intent in _unsettled(intents).items():
        if not key.startswith(DELETION):  # what is still listed then is deleted by a call of its own
            if is_heard(cloud, intent):
                said.append(f"an order that was cut off ({key}) did reach the cloud; what it made is counted")
            elif intent.ids:
                said.append(f"{', '.join(intent.ids)} ({key}) were ordered and are in no list: they are not counted")
        intents.forget(key)
    return tuple(said)


def _unsettled(intents: Intents) -> dict[str, Intent]:
    kinds = (MACHINES, DISK, DELETION)
    return {key: intent for key, intent in intents.pending().items() if key.split()[0] in kinds}


def is_heard(cloud: Cloud, intent: Intent) -> bool:
    """Whether what an order makes is listed; waits for all of it.

    From its last attempt on; where the cloud has answered, from now on.
    """
    look = cloud.instances if intent.key.split()[0] == MACHINES else cloud.disks
    now = time.time()
    until = (now if intent.ids else min(now, intent.at)) + cloud.pace.settle_s
    while True:
        found = len(look(tags={tags.INTENT_TAG: intent.token}))
        if found >= (len(intent.ids) or intent.count) or time.time() > until:
            return found > 0
        time.sleep(cloud.pace.poll_s)
