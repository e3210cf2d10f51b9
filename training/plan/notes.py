"""What stands beside a plan: that mixtures of experts are slower than it says; and what four bits a weight would win
where 16 fit: said, never taken, for they round what is learned beside. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from training.cost.shape import ModelShape
from training.plan.options import Option, Search, choose, rounded

MIXTURES = "a mixture of experts: published runs took 4 to 8 times as long as such a plan says, and cost as much more"
"""Tokens/s planned and published: Qwen3-30B-A3B on 4 x 5090 18,654 and 2,400, gpt-oss-20b 21,221 and 3,800, Gemma 4
26B-A4B 7,639 and 1,940."""
SETTING = "base_precision=nf4"
"""As `--set` takes it."""
FOUR_BITS_WORTH = 2.0
"""Times as fast as in 16 bits from which it is said: it costs exactness, and no card was ever timed with it. Where the
layers fit whole or in stages it wins less (docs/map.md); where they have to be gathered, up to 20 times."""


def mixture_notes(shape: ModelShape) -> tuple[str, ...]:
    """What is said beside each plan of this model."""
    return (MIXTURES,) if shape.mixture else ()


@dataclass(frozen=True)
class Rounded:
    """The way to take with the frozen layers in four bits, beside the one that is taken in 16."""

    option: Option
    tokens_per_s: float
    exact_tokens_per_s: float
    """In 16 bits."""

    @property
    def times(self) -> float:
        """As fast."""
        return self.tokens_per_s / self.exact_tokens_per_s

    def sentence(self, how: str) -> str:
        """`how`: what to type."""
        figures = f"{self.tokens_per_s:.0f} tokens/s instead of {self.exact_tokens_per_s:.0f}"
        return (
            f"in four bits a weight ({how}) {self.option.strategy} would do {figures}; that rounds the frozen layers, "
            "so another loss is learned, and is left to you: docs/training.md"
        )


def four_bits_faster(search: Search, taken: Option | None) -> Rounded | None:
    """None where it would not be, the recipe has four bits or takes none, or nobody knows how fast it is."""
    if taken is None or not taken.tokens_per_s or (rounded_search := rounded(search)) is None:
        return None
    option = choose(
        rounded_search.shape, rounded_search.recipe, rounded_search.machines, rounded_search.work, rounded_search.free
    ).chosen
    if option is None or option.tokens_per_s is None or option.tokens_per_s <= FOUR_BITS_WORTH * taken.tokens_per_s:
        return None
    return Rounded(option, option.tokens_per_s, taken.tokens_per_s)
