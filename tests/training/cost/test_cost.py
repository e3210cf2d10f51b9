"""What a run has cost, from the price of its machines and the times of its starts."""

from __future__ import annotations

import pytest

from training.cost.cards import card_bytes, card_named, unknown_card
from training.cost.pace import cost_so_far
from training.laptop.run_look import RunLook, details
from training.run.folder import Status, parse_status, status_text
from training.text.counts import money

RUNNING = Status("tiny-20260101-000000", "running", started=1000.0, updated=1900.0, price_h=4.0, currency="CNY")


def test_a_run_costs_the_hours_of_its_machines_until_now_or_until_it_ended():
    assert cost_so_far(RUNNING, 2800.0) == 2.0
    assert cost_so_far(RUNNING.changed(state="finished", ended=1900.0), 9999.0) == 1.0


def test_what_earlier_starts_cost_is_added():
    assert cost_so_far(RUNNING.changed(spent_before=3.5), 2800.0) == 5.5


def test_a_clock_that_went_back_makes_nothing_cheaper():
    assert cost_so_far(RUNNING.changed(spent_before=3.5), 0.0) == 3.5


def test_without_a_price_there_is_no_cost_and_no_words_for_it():
    assert cost_so_far(RUNNING.changed(price_h=None), 2800.0) is None
    assert money(None, "CNY") == "" and money(2, "CNY") == "2.00 CNY" and money(2, "") == "2.00"


def test_the_price_survives_status_json():
    assert parse_status(status_text(RUNNING)) == RUNNING


def test_a_lost_run_costs_until_its_last_word_and_one_that_lives_until_now():
    assert RunLook(RUNNING, alive=True, metrics=(), age_s=900.0).money == "2.00 CNY"
    assert RunLook(RUNNING, alive=False, metrics=(), age_s=900.0).money == "1.00 CNY"
    assert RunLook(None, alive=True, metrics=()).money == ""


def test_the_followed_line_ends_with_what_the_run_has_cost():
    row = {"step": 1, "total_steps": 2, "loss": 1.0, "lr": 1e-4, "tokens_per_s": 1.0, "memory_gib": 1.0, "step_s": 1.0}
    assert details(row, None, "2.00 CNY").endswith("1.0 GiB  2.00 CNY")
    assert details(row).endswith("GiB")


# What somebody means who types a kind of card.


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
    assert card_named(text) == card
    assert card is None or card_bytes(card) is not None


def test_memory_that_is_typed_counts():
    assert card_bytes(card_named("A100-40G") or "") == 40 * 2**30
    assert card_bytes(card_named("H20 141") or "") == 141 * 2**30


def test_a_slip_of_the_hand_is_answered_with_what_was_meant():
    assert unknown_card("RTX 409").startswith("nothing is known of it; did you mean RTX 4090? known: H200, ")
