"""Best-fit-decreasing packing: samples share rows of `max_length` tokens with little left over. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_BITS = 10
"""Two levels of 1,024: room up to a million tokens is looked up in two small integers."""
_WORD = (1 << _BITS) - 1


class _Rooms:
    """Which amounts of room some open row has left; finds the smallest that is large enough at once."""

    def __init__(self, most: int) -> None:
        self._words = [0] * ((most >> _BITS) + 1)
        self._summary = 0

    def add(self, room: int) -> None:
        self._words[room >> _BITS] |= 1 << (room & _WORD)
        self._summary |= 1 << (room >> _BITS)

    def remove(self, room: int) -> None:
        word = room >> _BITS
        self._words[word] &= ~(1 << (room & _WORD))
        if not self._words[word]:
            self._summary &= ~(1 << word)

    def smallest(self, least: int) -> int | None:
        word = least >> _BITS
        if rest := self._words[word] >> (least & _WORD):
            return least + _lowest_bit(rest)
        if rest := self._summary >> (word + 1):
            word += 1 + _lowest_bit(rest)
            return (word << _BITS) + _lowest_bit(self._words[word])
        return None


def _lowest_bit(value: int) -> int:
    return (value & -value).bit_length() - 1


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Sample numbers of each row: the longest first, each into the fullest row that still has room for it.

    Sorting apart, the time grows with the number of samples alone, and equal lengths always give equal rows.
    """
    rows: list[list[int]] = []
    rooms = _Rooms(max_length)
    open_rows: dict[int, list[int]] = {}
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        if not 0 < length <= max_length:
            raise ValueError(f"sample {number} has {length} tokens; a row holds 1 to {max_length}")
        room = rooms.smallest(length)
        if room is None:
            row, left = len(rows), max_length - length
            rows.append([])
        else:
            row, left = open_rows[room].pop(), room - length
            if not open_rows[room]:
                rooms.remove(room)
        rows[row].append(number)
        if left:
            open_rows.setdefault(left, []).append(row)
            rooms.add(left)
    return rows
