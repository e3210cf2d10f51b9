"""Packing: nothing lost, nothing too long, and close to what can be had at all."""

from __future__ import annotations

import random
import time

import pytest

from training.data.prepared import pack


def _lengths(seed, most, count):
    draw = random.Random(seed)
    return [min(most, max(1, int(draw.lognormvariate(4, 1.2)))) for _ in range(count)]


def _rescan(lengths, max_length):
    """Best fit decreasing by the book: every row looked at for every sample."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(max_length - length)
    return rooms


def _first_fit(lengths, max_length):
    rooms: list[int] = []
    for length in lengths:
        row = next((n for n, room in enumerate(rooms) if room >= length), None)
        if row is None:
            rooms.append(max_length - length)
        else:
            rooms[row] -= length
    return len(rooms)


@pytest.mark.parametrize("most", [1, 7, 512, 1023, 1024, 1025, 4096])
@pytest.mark.parametrize("seed", range(6))
def test_every_sample_is_in_one_row_and_rows_are_filled_as_by_the_book(most, seed):
    lengths = _lengths(seed, most, 300)
    rows = pack(lengths, most)
    assert sorted(number for row in rows for number in row) == list(range(300))
    rooms = [most - sum(lengths[number] for number in row) for row in rows]
    assert min(rooms) >= 0
    assert sorted(rooms) == sorted(_rescan(lengths, most))
    assert len(rows) <= _first_fit(lengths, most)
    assert len(rows) >= -(-sum(lengths) // most)
    assert pack(lengths, most) == rows


def test_a_row_that_can_be_filled_to_the_last_token_is():
    assert pack([5, 3, 8, 2, 6], 8) == [[2], [4, 3], [0, 1]]
    assert pack([], 8) == []


@pytest.mark.parametrize("length", [0, 9])
def test_a_sample_that_fits_no_row_is_refused(length):
    with pytest.raises(ValueError, match=f"sample 1 has {length} tokens; a row holds 1 to 8"):
        pack([4, length], 8)


def test_hundreds_of_thousands_of_samples_are_packed_in_seconds_with_next_to_nothing_left_over():
    lengths = _lengths(0, 4096, 300_000)
    began = time.process_time()
    rows = pack(lengths, 4096)
    assert time.process_time() - began < 5
    assert sum(lengths) / (len(rows) * 4096) > 0.999
