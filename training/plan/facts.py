"""What the plan is made from, besides the recipe: the data's report, the model's own metadata, the machines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from training.cost import cards
from training.cost.cards import sustained_flops
from training.cost.memory import GIB
from training.cost.pace import Rates
from training.cost.shape import ModelShape, model_shape
from training.plan.calibration import Calibration
from training.plan.measured import Corrections, Measured, corrections


@dataclass(frozen=True)
class Card:
    """A GPU as nvidia-smi names it."""

    name: str
    bytes: float
    """inf where it does not say."""


@dataclass(frozen=True)
class ModelMetadata:
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
    """Between two ranks; None where nobody knows."""
    link_from: str = ""
    """Where that is known from."""
    calibration: Calibration | None = None
    """What was measured on them."""
    runs: tuple[Measured, ...] = ()
    """What runs took, on them and elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Facts(Known):
    """All that is known of a run before it starts."""

    shape: ModelShape
    config: Mapping[str, Any]
    """The base model's config.json."""
    stops: frozenset[int]
    """Tokens that end a turn in the base model's own generation."""
    report: Mapping[str, Any]
    """What `training.node.prepare` found in the data."""
    ranks: int
    ranks_per_node: int
    card: Card | None
    """The head's first GPU; None where the ranks compute on the CPU."""
    ram_bytes: float
    disk_free_bytes: float

    @property
    def span(self) -> float | None:
        """How many tokens attention spans in these data, seen from a token; None where they were prepared before that
        was counted."""
        return self.report.get("attention_span") or None

    def share(self, key: str) -> float:
        """A count of the report as a share of all records."""
        return self.report[key] / max(1, self.report["records"])


def stop_tokens(metadata: ModelMetadata, tokenizer_eos: int | None) -> frozenset[int]:
    """The end-of-sequence ids of generation_config.json, else of config.json, else the tokenizer's."""
    for found in (metadata.generation.get("eos_token_id"), metadata.config.get("eos_token_id"), tokenizer_eos):
        if found is not None:
            return frozenset(found) if isinstance(found, list) else frozenset({found})
    return frozenset()


def read_facts(
    prepared: Mapping[str, Any],
    metadata: ModelMetadata,
    ranks_per_node: tuple[int, ...],
    known: Known,
) -> Facts:
    """`prepared` is what `training.node.prepare` printed."""
    report, machine = prepared["report"], prepared["machine"]
    gpus = machine["gpus"]
    return Facts(
        shape=model_shape(metadata.config, metadata.name),
        config=metadata.config,
        stops=stop_tokens(metadata, report["eos_id"]),
        report=report,
        ranks=sum(ranks_per_node),
        ranks_per_node=max(ranks_per_node),
        card=Card(gpus[0]["name"], (gpus[0]["memory_gib"] or inf) * GIB) if gpus else None,
        ram_bytes=machine["ram_gib"] * GIB,
        disk_free_bytes=machine["disk_free_gib"] * GIB,
        **vars(known),
    )


def memory_rate(facts: Facts) -> float | None:
    """Bytes/s of the cards' memory, of the data sheet: what is known of unpacking goes by that; else as measured."""
    if facts.card is None:
        return None
    made = facts.calibration if facts.calibration and facts.calibration.card == facts.card.name else None
    return cards.memory_rate(facts.card.name) or (made.memory_bytes_per_s if made else None)


def sustained(facts: Facts) -> tuple[float | None, str]:
    """What the cards sustain, or the CPUs, and where that is known from: measured on these machines, else by the card's
    name."""
    name, made = facts.card.name if facts.card else None, facts.calibration
    if made and (flops := made.sustained(name)):
        return flops, f"measured by {made.run_id} ({made.matmul_flops / 1e12:.3g} TFLOP/s in matmul)"
    if name is None:
        return None, ""
    flops = sustained_flops(name)
    return flops, f"the table, for {name}" if flops else ""


def corrected(facts: Facts) -> Corrections:
    """What runs on such machines say of the plan's seconds."""
    card = facts.card.name if facts.card else None
    return corrections(facts.runs, card, known_rates(facts), facts.ranks)


def to_device(facts: Facts) -> float | None:
    """Bytes a second from RAM to a card, where that was measured."""
    return facts.calibration.to_device(facts.card.name) if facts.card and facts.calibration else None


def known_rates(facts: Facts) -> Rates:
    """Of the cards in 16 bits, and of the network."""
    return Rates(sustained(facts)[0], facts.bytes_per_s, memory_rate(facts), to_device(facts))
