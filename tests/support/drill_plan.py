"""What the fault drill tries: which commands, which faults."""

from dataclasses import dataclass

import inventory.renting.tasks as renting
import snapshots.tasks as keeping
from inventory.aliyun_ecs.errors import ADVICE
from inventory.cloud.errors import Kind
from inventory.localcloud.ecs.dispatch import EVERY_TIME

MAKING = ("CreateVpc", "CreateVSwitch", "CreateSecurityGroup", "ImportKeyPair")
MAKING += ("RunInstances", "CreateDisk", "CreateSnapshot")
BUSY = (*MAKING, "AttachDisk", "ModifyDiskAttribute", "ModifyInstanceAutoReleaseTime", "DeleteInstances", "DeleteDisk")
HELD_S = 0.02
"""How long a call that times out is held before its connection is cut."""
TYPE = "ecs.local.small"


PINNED = "its machine must be there"
"""What is said where a machine cannot come from another zone, because its disk lies in one."""
DEARER = "no longer"
"""What is said where an hour costs more than what was shown and agreed to."""
HEADLESS = "te1, the head"
WENT = (
    "went meanwhile",
    "went while the others started",
    "were taken back",
    HEADLESS,
    "cannot be reached",
    "its machine stopped",
    "no data disk",
)
"""What is said of a machine that is gone."""


@dataclass(frozen=True)
class FaultKind:
    """A column of the matrix."""

    name: str
    kind: str = ""
    """Of inventory/localcloud/ecs/dispatch.py; empty: a machine is reclaimed before the call."""
    times: int = 1
    only: tuple = ()
    """Actions it can happen to; empty: all."""
    more: tuple = ()
    notice_s: float = 0
    words: tuple = ()
    """One of these is in what the user reads where the command gives up."""

    def happens_to(self, action):
        return not self.only or action in self.only


KINDS = (
    FaultKind("throttle", "throttle"),
    FaultKind("error-500", "error-500"),
    FaultKind("time-out", "time-out", more=(("hold_s", HELD_S),)),
    FaultKind("lost-answer", "lost-answer"),
    FaultKind("no-stock", "no-stock", only=("RunInstances",)),
    FaultKind("price-moved", "price-moved", more=(("instance_type", TYPE), ("factor", 1.5)), words=(DEARER,)),
    FaultKind("disk-initialising", "disk-initialising", only=("RunInstances", "CreateDisk"), more=(("hold_s", 0.05),)),
    FaultKind("busy", "busy", only=BUSY),
    FaultKind("late-list", "late-list", only=MAKING, more=(("hold_s", 0.05),)),
    FaultKind("not-yet-known", "not-yet-known", only=MAKING, more=(("hold_s", 0.05),)),
    FaultKind("reclaim, 5 minutes' notice", notice_s=300, words=WENT),
    FaultKind("reclaim, none", words=WENT),
    FaultKind("throttle, lasting", "throttle", EVERY_TIME, words=(ADVICE[Kind.THROTTLED],)),
    FaultKind("error-500, lasting", "error-500", EVERY_TIME, words=(ADVICE[Kind.PASSING],)),
    FaultKind(
        "no-stock, lasting",
        "no-stock",
        EVERY_TIME,
        only=("RunInstances",),
        words=("no machines were to be had", PINNED),
    ),
)


@dataclass(frozen=True)
class Command:
    """A row group of the matrix: a command, and what a cluster must look like before and after."""

    name: str
    task: object
    flags: tuple
    begins: str
    """Name of the state it begins in."""
    begins_words: str
    ends: str
    """A cluster that is up, nothing, or a snapshot."""
    disk_gib: int = 20
    since: str = ""
    """The first action that is disturbed; empty: from the first call on."""


COMMANDS = (
    Command("fab up", renting.up, (("yes", True),), "empty", "Two machines, of an account that has nothing", "cluster"),
    Command(
        "fab up, with a kept disk",
        renting.up,
        (("yes", True),),
        "kept",
        "Two machines in two orders, as one's disk waits for it; the calls before the orders are as above",
        "cluster",
        since="RunInstances",
    ),
    Command("fab snapshots.create", keeping.create, (), "up", "Of the head of a cluster of two", "snapshot"),
    Command(
        "fab rebuild",
        keeping.rebuild,
        (("yes", True),),
        "kept",
        "Two machines, one with its kept disk, the other's disk made apart as it is larger than the snapshot",
        "cluster",
        disk_gib=24,
    ),
    Command(
        "fab down --disks",
        renting.down,
        (("yes", True), ("disks", True), ("force", True)),  # nobody is behind its machines' addresses
        "up",
        "A cluster of two goes",
        "nothing",
    ),
)


@dataclass(frozen=True)
class Call:
    """The n-th call of an action; `number`: its place among all calls."""

    action: str
    nth: int
    number: int


@dataclass(frozen=True)
class Cell:
    """What came of one fault at one call."""

    call: Call
    kind: FaultKind
    word: str
    sentence: str = ""
    """The last one the user read, where the command failed."""
    problems: tuple = ()


NOT_APPLICABLE = "-"
