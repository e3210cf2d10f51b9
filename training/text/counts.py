"""Counts, sizes and amounts of money as sentences and tables show them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_HALF_EVEN, Decimal
from math import isfinite
from typing import Any


def many(count: int, noun: str) -> str:
    """So many of something: 1 node, 2 nodes."""
    return f"{count} {noun}{'s' * (count != 1)}"


def plain(value: float, digits: int = 3) -> str:
    """Rounded to so many digits, never with an exponent: 240, not 2.4e+02."""
    return f"{Decimal(f'{value:.{digits}g}'):f}"


def decimals(value: float, digits: int = 1) -> str:
    """With so many digits behind the point, and more where a little would be shown as nothing: 0.04, not 0.0."""
    text = f"{value:.{digits}f}"
    return plain(value, 1) if value and not float(text) else text


def size_text(nbytes: float, kilo: int = 1024) -> str:
    """Bytes in the unit that suits them: 40 B, 1.2 MiB. With a `kilo` of 1000, as files are told, 1.3 MB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB") if kilo == 1024 else ("B", "kB", "MB", "GB", "TB")
    place = 0
    while round(nbytes, 1 if place else 0) >= kilo and place < len(units) - 1:
        nbytes, place = nbytes / kilo, place + 1
    return f"{nbytes:.{1 if place else 0}f} {units[place]}"


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
    terms = list(amounts)
    return float(sum((rounded(amount, per) for amount in terms), Decimal(0))) or float(sum(terms))


NONE = "-"


def duration(minutes: float | None) -> str:
    """Minutes as a table shows them."""
    if minutes is None:
        return NONE
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def figure(value: float | None, how: str) -> str:
    """A number as a table shows it, or that it is not known."""
    return NONE if value is None else format(value, how)


def finite(value: Any) -> Any:
    """With null for every number that is none: for JSON."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def size(amount_bytes: int | None) -> str:
    """Bytes as a table shows them."""
    return NONE if amount_bytes is None else size_text(amount_bytes)
