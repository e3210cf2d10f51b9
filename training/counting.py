"""Counts, numbers and sizes as sentences and tables say them. Pure."""

from __future__ import annotations

from decimal import Decimal


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
