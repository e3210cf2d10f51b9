"""Fleet: the machines that a plan is for, before anything is known of how fast they are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from inventory.nodes import Node


@dataclass(frozen=True)
class Fleet:
    """Machines of one kind."""

    nodes: int
    cards: int
    """Of a node; 0: the ranks compute on its CPU."""
    card: str | None = None
    """What kind they are; None where nobody says."""
    ram_gib: float | None = None
    """Of a node."""
    line_rate_gbps: float | None = None
    price_h: float | None = None
    """Of all together."""
    currency: str = ""
    about: str = ""
    """Where they come from, for people."""
    head: Node | None = None
    """The first of them, where they stand."""
    names: frozenset[str] = frozenset()
    """Of all, where they stand."""
    kinds: tuple[str, ...] = ()
    """Of each node's cards, where not all nodes have the same; `card` is then empty."""
    each: tuple[int, ...] = ()
    """How many cards each node has, where not all have as many; `cards` is then the most."""
    own: bool = True
    """Whether a start would find just these: not machines as somebody wishes them."""
    notes: tuple[str, ...] = ()
    """What is not known of them, and how to say it."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Ranks of each node, as a launch starts them: one a card, one on a node without any."""
        return tuple(max(1, count) for count in self.each or (self.cards,) * self.nodes)

    @property
    def cards_text(self) -> str:
        """How many cards the nodes have each, for people."""
        return " or ".join(map(str, dict.fromkeys(self.each or (self.cards,))))
