"""What the plan is made from, besides the recipe: the data's report, the model's own metadata, the machines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.cost.memory import GIB
from training.cost.shape import ModelShape, read_outline
from training.plan.hardware import Card, Known, NodeHardware, machines_of, rank_cards
from training.plan.machines import PlannedMachines, Workload


@dataclass(frozen=True)
class ModelMetadata:
    """What a base model's folder says of it."""

    name: str
    config: Mapping[str, Any]
    """config.json."""
    generation: Mapping[str, Any]
    """generation_config.json; empty where there is none."""


ROOM_OF_A_NODE = 1 * GIB
"""For a run's code and data on any node, and what it writes there."""


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
    """The smallest; None where the ranks compute on the CPU."""
    mixed: tuple[Card, ...] = ()
    """Every rank's, in rank order, where they are of several kinds."""
    ram_bytes: float
    """Of the node that has least."""
    disk_free_bytes: float
    """On the head."""
    full_nodes: tuple[str, ...] = ()
    """Those on which not even the run's files have room."""
    held_out: int = 0
    """Records kept out of training, to measure by."""

    @property
    def machines(self) -> PlannedMachines:
        """With how fast they are, as far as anybody knows."""
        cards = self.mixed or ((self.card,) * self.ranks if self.card else ())
        return machines_of(cards, self.ranks, self.ranks_per_node, self.ram_bytes, self)

    @property
    def span(self) -> float | None:
        """How many tokens attention spans in these data, seen from a token; None where they were prepared before that
        was counted."""
        return self.report.get("attention_span") or None

    @property
    def work(self) -> Workload:
        """What there is to learn."""
        return Workload(self.report["rows"], self.report["tokens"], self.report["longest"], self.span)

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
    prepared: Mapping[str, Any], metadata: ModelMetadata, nodes: Sequence[NodeHardware], known: Known
) -> Facts:
    """`prepared` is what `training.node.prepare` printed; `nodes` are in rank order."""
    report, cards = prepared["report"], rank_cards(nodes)
    return Facts(
        shape=read_outline(prepared["outline"]),
        config=metadata.config,
        stops=stop_tokens(metadata, report["eos_id"]),
        report=report,
        ranks=sum(node.slots for node in nodes),
        ranks_per_node=max(node.slots for node in nodes),
        card=min(cards, key=lambda card: card.bytes, default=None),
        mixed=cards if len(set(cards)) > 1 else (),
        ram_bytes=min(node.ram_bytes for node in nodes),
        disk_free_bytes=prepared["disk_free_gib"] * GIB,
        full_nodes=tuple(node.name for node in nodes if node.disk_free_bytes < ROOM_OF_A_NODE),
        held_out=(prepared.get("validation") or {}).get("records", 0),
        **vars(known),
    )
