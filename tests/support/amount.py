"""Prices that let nobody but training/text/counts.py write them out; a sum, difference or multiple of one is one too.

The cloud in memory tells such prices, and the tables of tests/test_tables.py hold them.
"""

from __future__ import annotations

import operator
import sys

OURS = ("inventory", "snapshots", "deploy", "training")
MAY = ("training.text.counts", "inventory.renting.tags")
"""Who may: the formatter, and the tags of machines, which are read again."""


def _refuse_by_hand(depth=2):
    module = sys._getframe(depth).f_globals.get("__name__", "")
    if module.startswith(OURS) and module not in MAY:
        raise AssertionError(f"{module} writes an amount of money out by hand; training/text/counts.py does that")


class Amount(float):
    """Of money."""

    def __format__(self, spec):
        _refuse_by_hand()
        return float(self).__format__(spec)

    def __repr__(self):
        _refuse_by_hand()
        return repr(float(self))

    __str__ = __repr__

    def __round__(self, digits=None):
        return Amount(round(float(self), digits))

    def __neg__(self):
        return Amount(-float(self))

    def __abs__(self):
        return Amount(abs(float(self)))


def _of_both(name):
    plain = getattr(operator, name)

    def forward(self, other):
        return Amount(plain(float(self), float(other)))

    def backward(self, other):
        return Amount(plain(float(other), float(self)))

    return forward, backward


def _of_share(self, other):
    """Of two amounts a ratio, which may be shown as anything."""
    share = float(self) / float(other)
    return share if isinstance(other, Amount) else Amount(share)


Amount.__truediv__ = _of_share
for _name in ("add", "sub", "mul"):
    for _prefix, _method in zip(("__", "__r"), _of_both(_name), strict=True):
        setattr(Amount, f"{_prefix}{_name}__", _method)
