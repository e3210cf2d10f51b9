"""The adapter that a run began with, where it is a second stage of earlier ones: what its run folder says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.bounded import bounded_json
from training.sums import ADAPTER_WEIGHTS

FOLDER = "began-with"
"""In a run folder: the weights it began with, on the head alone."""
RECORD = f"{FOLDER}.json"
"""What they are, and what those began with in their turn; it comes home with the run."""
WEIGHTS = f"{FOLDER}/{ADAPTER_WEIGHTS}"


@dataclass(frozen=True)
class EarlierStage:
    """A checkpoint of an earlier run."""

    run_id: str
    step: int
    adapter: str
    """sha256 of its weights."""
    data: str
    """Hash of what it had learned from."""

    @property
    def words(self) -> str:
        return f"the adapter of {self.run_id}, step {self.step}"


def record_text(stages: Sequence[EarlierStage]) -> str:
    """The JSON of RECORD; the first stage first."""
    return json.dumps([asdict(stage) for stage in stages], indent=1) + "\n"


def parse_record(text: str) -> tuple[EarlierStage, ...]:
    """The stages in it; none in an empty text. Raises ValueError where it is none."""
    try:
        rows: list[Mapping[str, Any]] = bounded_json(text) if text.strip() else []
        return tuple(EarlierStage(str(r["run_id"]), int(r["step"]), str(r["adapter"]), str(r["data"])) for r in rows)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no {RECORD}: {error}") from error


def stages_of(run: Path) -> tuple[EarlierStage, ...]:
    """The stages before a run; none where it began with an adapter of its own, or says nothing that can be read."""
    try:
        return parse_record((run / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
