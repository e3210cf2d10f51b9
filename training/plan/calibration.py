"""What `fab prove` measured of a cluster: the plan goes by it instead of by its table of cards. Pure.

The file lies on the head beside the runs and in the folder of the run that made it. It is of one kind of card and one
number of ranks, and says nothing of others.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from training.cost.cards import same_kind
from training.plan.record import BYTES_PER_S, FLOPS, read

FILE = "calibration.json"
OF_MATMUL = 0.6
"""Of a card's measured matrix rate, what LoRA training sustains: 0.55 to 0.66 where both were published (A100, 4090,
3090)."""


@dataclass(frozen=True)
class Ranks:
    """Whose link is asked for."""

    cluster: str
    count: int
    cards: tuple[str, ...]
    """Their kinds; none where they compute on the CPU."""
    nodes: frozenset[str] = frozenset()
    """Their names; none where they are all on this machine."""

    def are_on(self, nodes: Collection[str]) -> bool:
        """Whether these are their nodes; what was measured before names were kept has none, and may be theirs."""
        return not nodes or not self.nodes or set(nodes) == self.nodes


@dataclass(frozen=True)
class Calibration:
    """The slowest rank's rates: a step lasts as long as that one's."""

    run_id: str
    cluster: str
    time: float
    """Seconds since the epoch, on the machine that asked."""
    world_size: int
    card: str | None
    """As the driver names it; None where the ranks compute on the CPU."""
    matmul_flops: float
    """In bfloat16; in float16 on a card that has none."""
    memory_bytes_per_s: float
    to_device_bytes_per_s: float | None
    link_bytes_per_s: float | None
    """All-gather's busbw; None for a single rank."""
    own_loss_s: float | None = None
    """Seconds of our own loss on a chunk, of the rank that was slowest with it; None where only it was there."""
    liger_loss_s: float | None = None
    """Of Liger's on the same chunk; None where it was not there, or not our loss."""
    ram_bytes: float | None = None
    """Of the node that has least."""
    nodes: tuple[str, ...] = ()
    """That were measured; none in what was written before their names were kept."""

    def sustained(self, card: str | None) -> float | None:
        """FLOP/s that training sustains on such a card, or where ranks compute on the CPU (None); None for another
        kind."""
        return OF_MATMUL * self.matmul_flops if card == self.card else None

    def prefers_own_loss(self, card: str) -> bool:
        """Whether our own loss was faster than Liger's on such a card."""
        if card != self.card or self.own_loss_s is None or self.liger_loss_s is None:
            return False
        return self.own_loss_s < self.liger_loss_s

    def ram(self, card: str | None) -> float | None:
        """Bytes of RAM of a node with such cards, or without (None); None for another kind."""
        return self.ram_bytes if same_kind(card, self.card) else None

    def link(self, whose: Ranks) -> float | None:
        """Bytes a second between these ranks; None where others were measured."""
        same = (whose.cluster, whose.count) == (self.cluster, self.world_size) and whose.are_on(self.nodes)
        alike = all(same_kind(self.card, each) for each in whose.cards or (None,))
        return self.link_bytes_per_s if same and alike else None


def calibration_file(runs: Path) -> str:
    """Its place on a head, or on this machine for `--here`."""
    return str(runs / FILE)


def text(calibration: Calibration) -> str:
    """As the JSON of calibration.json."""
    return json.dumps(asdict(calibration), indent=1) + "\n"


RANGES = {
    "matmul_flops": FLOPS,
    **dict.fromkeys(("memory_bytes_per_s", "to_device_bytes_per_s", "link_bytes_per_s"), BYTES_PER_S),
}


def parse(content: str) -> Calibration:
    """The calibration in a JSON text. Raises ValueError where it is none."""
    return read(Calibration, content, RANGES)
