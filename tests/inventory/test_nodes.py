"""Node: what the cluster's machines say of themselves together."""

from dataclasses import replace

from inventory.nodes import Node, price_of


def test_nodes_cost_together_what_each_says_and_nothing_is_made_up(tmp_path):
    first = Node("te1", 0, "a", "a", "root", 22, tmp_path, tmp_path, 0, price_h=2.5, currency="CNY")
    second = replace(first, name="te2", rank=1)
    assert price_of([first, second]) == (5.0, "CNY")
    assert price_of([first, replace(second, price_h=None)]) == (None, "")
    assert price_of([first, replace(second, currency="USD")]) == (None, "")
