"""Best-fit-decreasing packing: samples share rows of `max_length` tokens with little left over. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Sample numbers of each row: the longest first, each into the fullest row that still has room for it.

    Sorting apart, the time grows with the number of samples alone, and equal lengths always give equal rows.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # that some open row has left, ascending
    open_rows: dict[int, list[int]] = {}
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        if not 0 < length <= max_length:
            raise ValueError(f"sample {number} has {length} tokens; a row holds 1 to {max_length}")
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, left = len(rows), max_length - length
            rows.append([])
        else:
            room = rooms[place]
            row, left = open_rows[room].pop(), room - length
            if not open_rows[room]:
                del rooms[place], open_rows[room]
        rows[row].append(number)
        if left:
            if left not in open_rows:
                insort(rooms, left)
            open_rows.setdefault(left, []).append(row)
    return rows
