"""What `fab prove` measured of a cluster: the plan goes by it instead of by its table of cards. Pure.

The file lies on the head beside the runs and in the folder of the run that made it. It is of one kind of card and one
number of ranks, and says nothing of others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "calibration.json"
OF_MATMUL = 0.6
"""Of a card's measured matrix rate, what LoRA training sustains: 0.55 to 0.66 where both were published (A100, 4090,
3090)."""


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

    def sustained(self, card: str | None) -> float | None:
        """FLOP/s that training sustains on such a card, or where ranks compute on the CPU (None); None for another
        kind."""
        return OF_MATMUL * self.matmul_flops if card == self.card else None

    def to_device(self, card: str) -> float | None:
        """Bytes a second from RAM to such a card; None for another kind."""
        return self.to_device_bytes_per_s if card == self.card else None

    def prefers_own_loss(self, card: str) -> bool:
        """Whether our own loss was faster than Liger's on such a card."""
        if card != self.card or self.own_loss_s is None or self.liger_loss_s is None:
            return False
        return self.own_loss_s < self.liger_loss_s

    def link(self, cluster: str, world_size: int) -> float | None:
        """Bytes a second between the ranks of this cluster; None for another number of them."""
        return self.link_bytes_per_s if (cluster, world_size) == (self.cluster, self.world_size) else None


def calibration_file(runs: Path) -> str:
    """Its place on a head, or on this machine for `--here`."""
    return str(runs / FILE)


def text(calibration: Calibration) -> str:
    """As the JSON of calibration.json."""
    return json.dumps(asdict(calibration), indent=1) + "\n"


def parse(content: str) -> Calibration:
    """The calibration in a JSON text. Raises ValueError where it is none."""
    found = json.loads(content)
    try:
        made = Calibration(**{name: value for name, value in found.items() if name in Calibration.__dataclass_fields__})
    except (AttributeError, TypeError) as error:
        raise ValueError(f"it is no calibration: {error}") from error
    measured = (made.matmul_flops, made.memory_bytes_per_s, made.to_device_bytes_per_s, made.link_bytes_per_s)
    seconds = (made.time, made.own_loss_s, made.liger_loss_s)
    if not all(each is None or (isinstance(each, int | float) and each > 0) for each in (*measured, *seconds)):
        raise ValueError("a rate in it is not above 0")
    return made
