"""Money as it is shown, everywhere the same: the amount, its currency, and what it is for. Pure; on the laptop and on
the nodes, so above both."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_HALF_EVEN, Decimal

HOUR, MONTH = "an hour", "a month"
FINE = Decimal("0.0001")
"""What clouds tell the price of an hour in; a disk's is less than a hundredth."""
COARSE = Decimal("0.01")


def money(amount: float | None, currency: str = "", per: str = "") -> str:
    """As in `12.30 CNY a month`; an hour's price with up to four decimals, at least two. Empty for one that is not
    known."""
    return "" if amount is None else f"{bare(amount, currency, per)} {per}".rstrip()


def bare(amount: float | None, currency: str = "", per: str = "") -> str:
    """The same where a heading, or words in another language, say what it is for."""
    if amount is None:
        return ""
    shown = rounded(amount, per)
    if amount > 0 and not shown:  # seconds of a machine are no gift
        return f"<{FINE if per == HOUR else COARSE} {currency}".rstrip()
    text = f"{shown:f}"
    if per == HOUR:
        whole, _, rest = text.partition(".")
        text = f"{whole}.{rest.rstrip('0').ljust(2, '0')}"
    return f"{text} {currency}".rstrip()


def rounded(amount: float, per: str = "") -> Decimal:
    """The amount that is shown."""
    return Decimal(repr(float(amount))).quantize(FINE if per == HOUR else COARSE, ROUND_HALF_EVEN) + 0


def added(amounts: Iterable[float], per: str = "") -> float:
    """The sum of amounts as they are shown, so that a table adds up in its last digit; of those that are all too small
    to be shown, what they are."""
    found = list(amounts)
    return float(sum((rounded(amount, per) for amount in found), Decimal(0))) or float(sum(found))
