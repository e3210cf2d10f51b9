"""What somebody means who types a kind of card."""

from __future__ import annotations

import pytest

from training.cost.card_names import meant, unknown
from training.cost.cards import card_bytes


@pytest.mark.parametrize(
    ("text", "card"),
    [
        ("A100-40G", "A100 40GB"),
        ("A100 40", "A100 40GB"),
        ("A100-80GB", "A100"),
        ("A10 24", "A10"),
        ("RTX 4090 48G", "RTX 4090 48GB"),
        ("4090 48gib", "RTX 4090 48GB"),
        ("H20 141", "H20 141GB"),
        ("4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("GeForce RTX 4090", "RTX 4090"),
        ("A 100", "A100"),
        ("h100 pcie", "H100 PCIe"),
        ("A10G", "A10G"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4 40GB"),
        ("Tesla T4", "Tesla T4"),
        ("Z80 96GB", "Z80 96GB"),
        ("Z80", None),
        ("RTX 409", None),
        ("", None),
    ],
)
def test_a_card_is_known_by_what_people_call_it(text, card):
    assert meant(text) == card
    assert card is None or card_bytes(card) is not None


def test_memory_that_is_typed_counts():
    assert card_bytes(meant("A100-40G") or "") == 40 * 2**30
    assert card_bytes(meant("H20 141") or "") == 141 * 2**30


def test_a_slip_of_the_hand_is_answered_with_what_was_meant():
    assert unknown("RTX 409").startswith("nothing is known of it; did you mean RTX 4090? known: H200, ")
