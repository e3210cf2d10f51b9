"""Which machines are worth renting: nothing is shown that another beats in money and in time."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from training.cost.cards import Rates, card_bytes, sustained_flops
from training.cost.pace import LINE_SHARE
from training.cost.shape import known_shape
from training.laptop.preparing import ONE_MACHINE
from training.models.names import load_recipe
from training.plan.frontier import Offered, RentOption, cheaper_in_numbers, frontier, rows, ways
from training.plan.machines import PlannedMachines, Workload, room

JAKARTA = {"A10": 11.73, "A100": 34.48}
"""CNY an hour of a machine with one such card, on demand, October 2024; an A100 has 80 GB."""
GBPS = {"A10": 16, "A100": 8}
ONE_STEP = {"global_batch": "16", "max_length": "2048"}


def offered(card, nodes, **more):
    has = card_bytes(card)
    link = LINE_SHARE * GBPS[card] / 8 * 1e9 if nodes > 1 else ONE_MACHINE
    usable, spare = room(has, gpu=True)
    rates = Rates(sustained_flops(card), link)
    at = PlannedMachines(nodes, 1, card, has, usable, spare, inf, rates, price_h=nodes * JAKARTA[card], currency="CNY")
    return Offered(card, nodes, at, **more)


def found(model="qwen2.5-14b", cards=("A10", "A100"), counts=(1, 2, 3, 4, 6, 8), work=None, **more):
    recipe = load_recipe(model, ONE_STEP)
    return ways(known_shape(recipe.base_model), recipe, [offered(c, n, **more) for c in cards for n in counts], work)


def named(ways):
    return [(way.offered.type_name, way.offered.nodes) for way in ways]


def pick(ways, card, nodes):
    (one,) = [way for way in ways if (way.offered.type_name, way.offered.nodes) == (card, nodes)]
    return one


def test_one_a100_beats_four_a10_in_money_and_in_time_at_jakartas_prices():
    all_ways = found()
    one, four = pick(all_ways, "A100", 1), pick(all_ways, "A10", 4)
    assert (one.offered.machines.price_h, four.offered.machines.price_h) == (34.48, pytest.approx(46.92))
    assert one.money == pytest.approx(3.82, rel=0.02), "a million tokens, as the other model has it"
    assert four.money == pytest.approx(6.37, rel=0.02), "as the other model has a pipeline of four"
    assert four.option.strategy == "pipeline" and one.seconds < four.seconds
    shown = frontier(all_ways)
    assert named(shown)[0] == ("A100", 1) and ("A10", 4) not in named(shown)


def test_the_frontier_begins_with_the_cheapest_ends_with_the_fastest_and_nothing_on_it_is_beaten():
    all_ways = found("qwen2.5-7b")
    shown = frontier(all_ways, most=99)
    assert shown[0].money == min(way.money for way in all_ways)
    assert shown[-1].seconds == min(way.seconds for way in all_ways)
    for way in shown:
        better = [o for o in all_ways if o.money <= way.money and o.seconds <= way.seconds and o is not way]
        assert better == [], named([way, *better])
    for way in all_ways:
        if way not in shown:
            assert any(o.money <= way.money and o.seconds <= way.seconds for o in shown)


def test_of_many_ways_a_few_are_shown_both_ends_among_them():
    all_ways = found("qwen2.5-7b", counts=(1, 2, 4, 8, 16))
    everything, some = frontier(all_ways, most=99), frontier(all_ways, most=3)
    assert len(everything) > 3 == len(some)
    assert (some[0], some[-1]) == (everything[0], everything[-1])
    assert list(some) == [way for way in everything if way in some]


@pytest.mark.parametrize(("card", "model"), [("A10", "qwen2.5-3b"), ("A100", "qwen2.5-7b")])
def test_where_the_model_fits_one_card_well_more_machines_buy_time_never_money(card, model):
    all_ways = found(model, cards=[card], counts=(1, 2, 4, 8))
    assert cheaper_in_numbers(all_ways) is None
    assert [way.money for way in all_ways] == sorted(way.money for way in all_ways)
    assert [way.seconds for way in all_ways] == sorted((way.seconds for way in all_ways), reverse=True)


def test_where_fewer_are_too_small_for_the_model_it_is_said_which_are_cheaper_together():
    fewer, more = cheaper_in_numbers(found("qwen2.5-14b", cards=["A10"]))
    assert named([fewer, more]) == [("A10", 2), ("A10", 3)]


def test_with_data_money_and_time_are_of_the_whole_run():
    work = Workload(rows=3200, tokens=3200 * 2048, longest=2048)
    one = pick(found("qwen2.5-7b", work=work), "A100", 1)
    assert one.seconds == 60 * one.option.minutes
    assert one.money == pytest.approx(one.option.money) == pytest.approx(34.48 * one.seconds / 3600)


def test_machines_on_which_nothing_fits_and_ranks_without_a_row_are_left_out():
    recipe = load_recipe("qwen2.5-14b", {"global_batch": "2", "max_length": "2048"})
    shape = known_shape(recipe.base_model)
    left = ways(shape, recipe, [offered("A10", 1), offered("A100", 2), offered("A100", 4)])
    assert named(left) == [("A100", 2)]


def test_what_is_not_in_stock_is_shown_only_where_nothing_else_can_be_planned():
    there, gone = found(cards=["A10"]), found(cards=["A100"], in_stock=False)
    assert {name for name, _ in named(rows((*there, *gone)))} == {"A10"}
    assert {name for name, _ in named(rows(gone))} == {"A100"}


def test_without_a_price_hours_of_machines_stand_for_money():
    def free(way):
        return RentOption(replace(way.offered, machines=replace(way.offered.machines, price_h=None)), way.option)

    shown = frontier([free(way) for way in found("qwen2.5-3b", cards=["A10"])])
    assert named(shown)[0] == ("A10", 1) and named(shown)[-1] == ("A10", 8)
    assert shown[0].money is None


def test_what_an_estimate_cannot_tell_apart_is_not_called_cheaper():
    few, more = (pick(found("qwen2.5-3b", cards=["A10"]), "A10", nodes) for nodes in (1, 2))

    def at(price_h):
        return RentOption(replace(more.offered, machines=replace(more.offered.machines, price_h=price_h)), more.option)

    equal = more.offered.machines.price_h * few.expense / more.expense
    assert cheaper_in_numbers([few, at(0.98 * equal)]) is None
    assert cheaper_in_numbers([few, at(0.95 * equal)]) is not None


def test_where_no_times_are_known_the_fewest_machines_of_each_type_are_shown_the_cheapest_first():
    slow = [
        replace(each, machines=replace(each.machines, rates=Rates(None, None)))
        for each in (offered("A100", 1), offered("A10", 2), offered("A10", 4))
    ]
    recipe = load_recipe("qwen2.5-14b", ONE_STEP)
    shown = rows(ways(known_shape(recipe.base_model), recipe, slow))
    assert named(shown) == [("A10", 2), ("A100", 1)] and shown[0].seconds is None
