"""What the plan is made from, besides the recipe: the data's report, the model's own papers, the machines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from training.cost.cards import sustained_flops
from training.cost.memory import GIB
from training.cost.shape import ModelShape, model_shape
from training.plan.calibration import Calibration


@dataclass(frozen=True)
class Card:
    """A GPU as nvidia-smi names it."""

    name: str
    bytes: float
    """inf where it does not say."""


@dataclass(frozen=True)
class Papers:
    """What a base model's folder says of it."""

    name: str
    config: Mapping[str, Any]
    """config.json."""
    generation: Mapping[str, Any]
    """generation_config.json; empty where there is none."""


@dataclass(frozen=True)
class Known:
    """How fast these machines are, as far as anybody knows."""

    bytes_per_s: float | None
    """Between two ranks."""
    link_from: str = ""
    """Where that is known from."""
    calibration: Calibration | None = None
    """What was measured on them."""


@dataclass(frozen=True)
class Facts:
    """All that is known of a run before it starts."""

    shape: ModelShape
    config: Mapping[str, Any]
    """The base model's config.json."""
    stops: frozenset[int]
    """Tokens that end a turn in the base model's own generation."""
    report: Mapping[str, Any]
    """What `training.prepare` found in the data."""
    ranks: int
    ranks_per_node: int
    card: Card | None
    """The head's first GPU; None where the ranks compute on the CPU."""
    ram_bytes: float
    disk_free_bytes: float
    bytes_per_s: float | None
    """Between two ranks; None where nobody knows."""
    link_from: str = ""
    """Where that is known from."""
    calibration: Calibration | None = None
    """What was measured on these machines."""

    def share(self, key: str) -> float:
        """A count of the report as a share of all records."""
        return self.report[key] / max(1, self.report["records"])


def stop_tokens(papers: Papers, tokenizer_eos: int | None) -> frozenset[int]:
    """The end-of-sequence ids of generation_config.json, else of config.json, else the tokenizer's."""
    for found in (papers.generation.get("eos_token_id"), papers.config.get("eos_token_id"), tokenizer_eos):
        if found is not None:
            return frozenset(found) if isinstance(found, list) else frozenset({found})
    return frozenset()


def read_facts(
    prepared: Mapping[str, Any],
    papers: Papers,
    ranks_per_node: tuple[int, ...],
    known: Known,
) -> Facts:
    """`prepared` is what `training.prepare` printed."""
    report, machine = prepared["report"], prepared["machine"]
    gpus = machine["gpus"]
    return Facts(
        shape=model_shape(papers.config, papers.name),
        config=papers.config,
        stops=stop_tokens(papers, report["eos_id"]),
        report=report,
        ranks=sum(ranks_per_node),
        ranks_per_node=max(ranks_per_node),
        card=Card(gpus[0]["name"], (gpus[0]["memory_gib"] or inf) * GIB) if gpus else None,
        ram_bytes=machine["ram_gib"] * GIB,
        disk_free_bytes=machine["disk_free_gib"] * GIB,
        bytes_per_s=known.bytes_per_s,
        link_from=known.link_from,
        calibration=known.calibration,
    )


def sustained(facts: Facts) -> tuple[float | None, str]:
    """What the cards sustain, and where that is known from: measured on these machines, else by the card's name."""
    if facts.card is None:
        return None, ""
    made = facts.calibration
    if made and (flops := made.sustained(facts.card.name)):
        return flops, f"measured by {made.run_id} ({made.matmul_flops / 1e12:.3g} TFLOP/s in matmul)"
    flops = sustained_flops(facts.card.name)
    return flops, f"the table, for {facts.card.name}" if flops else ""
