"""What a run has cost, from the price of its machines and the times of its starts."""

from training.cost.money import cost
from training.laptop.follow import RunLook, details
from training.money import money
from training.run_folder import Status, parse_status, status_text

RUNNING = Status("tiny-20260101-000000", "running", started=1000.0, updated=1900.0, price_h=4.0, currency="CNY")


def test_a_run_costs_the_hours_of_its_machines_until_now_or_until_it_ended():
    assert cost(RUNNING, 2800.0) == 2.0
    assert cost(RUNNING.changed(state="finished", ended=1900.0), 9999.0) == 1.0


def test_what_earlier_starts_cost_is_added():
    assert cost(RUNNING.changed(spent_before=3.5), 2800.0) == 5.5


def test_a_clock_that_went_back_makes_nothing_cheaper():
    assert cost(RUNNING.changed(spent_before=3.5), 0.0) == 3.5


def test_without_a_price_there_is_no_cost_and_no_words_for_it():
    assert cost(RUNNING.changed(price_h=None), 2800.0) is None
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
