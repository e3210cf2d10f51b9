"""Which kind of card somebody means who types `4090`, `A 100` or `A100-40G`. Pure."""

from __future__ import annotations

import re
from difflib import get_close_matches

from training.cost.cards import CARDS, SAME_MEMORY, card_bytes, rates_of

LEAST_GB = 8
"""From which on a bare number behind a kind is its memory."""
_MEMORY = re.compile(r"(?P<kind>.*\S)[\s-]+(?P<gb>\d{1,3}) ?(?P<unit>G|GB|GIB)?", re.IGNORECASE)


def meant(text: str) -> str | None:
    """The card, as the table of cards is asked for it: its kind, with its memory where that is not what such cards
    usually have. None for one that nothing is known of."""
    text = text.strip()
    if kind := _EXACT.get(_compact(text)):
        return kind
    if match := _MEMORY.fullmatch(text):
        kind = _EXACT.get(_compact(match["kind"])) or match["kind"]
        if said := _with_memory(kind, int(match["gb"]), bool(match["unit"])):
            return said
    return text if card_bytes(text) is not None else None


def _with_memory(kind: str, gb: int, sure: bool) -> str | None:
    """None where the number is no memory: too small a bare one, or behind a kind that is not known."""
    if not gb or not (sure or (gb >= LEAST_GB and rates_of(kind))):
        return None
    usual = card_bytes(kind)
    is_usual = usual is not None and abs(gb * 2**30 / usual - 1) < SAME_MEMORY
    return kind if is_usual else f"{kind} {gb}GB"


def unknown(text: str) -> str:
    """What is said of a card that nothing is known of."""
    near = get_close_matches(text.strip().upper(), CARDS, n=1)
    ask = f"did you mean {near[0]}? " if near else ""
    return f"nothing is known of it; {ask}known: {', '.join(CARDS)}"


def _compact(text: str) -> str:
    return re.sub(r"nvidia|geforce|[\s_-]", "", text.lower())


_EXACT = {_compact(name): name for name in CARDS}
_EXACT |= {_compact(name.removeprefix("RTX ")): name for name in CARDS}
"""By what is left of a name without its spaces and its maker."""
