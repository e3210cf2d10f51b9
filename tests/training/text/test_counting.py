"""Counts and numbers as sentences say them."""

from __future__ import annotations

import pytest

from training.text.counts import decimals, many, plain, size_text


def test_one_is_not_many():
    assert [many(count, "row") for count in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [
        (240, 2, "240"),
        (1, 2, "1"),
        (0.5, 2, "0.5"),
        (4812.3, 3, "4810"),
        (1030.0, 3, "1030"),
        (0.00000123, 3, "0.00000123"),
    ],
)
def test_no_number_has_an_exponent(value, digits, said):
    assert plain(value, digits) == said


@pytest.mark.parametrize(
    ("nbytes", "in_binary", "in_thousands"),
    [
        (0, "0 B", "0 B"),
        (40, "40 B", "40 B"),
        (1023.7, "1.0 KiB", "1.0 kB"),
        (999_960, "976.5 KiB", "1.0 MB"),
        (2**20 - 1, "1.0 MiB", "1.0 MB"),
        (29_500_000_000, "27.5 GiB", "29.5 GB"),
        (3 * 2**50, "3072.0 TiB", "3377.7 TB"),
    ],
)
def test_a_size_is_in_the_unit_that_suits_it_and_never_nothing(nbytes, in_binary, in_thousands):
    assert (size_text(nbytes), size_text(nbytes, 1000)) == (in_binary, in_thousands)


def test_a_little_is_not_shown_as_nothing():
    assert [decimals(value) for value in (0, 0.04, 0.05001, 12.34, -0.01)] == ["0.0", "0.04", "0.1", "12.3", "-0.01"]
