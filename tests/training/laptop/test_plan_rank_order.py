"""Which nodes stand beside each other: those between which stages talk, over the links that were measured fastest."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest

from tests.support.heads import cluster_of
from training.laptop import preparing
from training.laptop.head_node import HereHead
from training.models.names import load_recipe
from training.plan.facts import Card, NodeHardware
from training.plan.layout import between, in_a_row
from training.run.launch import Host, Launch

NAMES = ("te1", "te2", "te3", "te4")


def speeds(slow=()):
    """16 Gbit/s between any two, 2 where they are `slow` to each other."""
    pairs = dict.fromkeys(permutations(NAMES, 2), 16.0)
    return pairs | {pair: 2.0 for a, b in slow for pair in ((a, b), (b, a))}


def test_stages_stand_so_that_no_slow_link_is_between_two_of_them():
    found = in_a_row(NAMES, speeds(slow=[("te1", "te2"), ("te3", "te4")]), 1, 4)
    assert found[0] == "te1" and set(found) == set(NAMES)
    assert min(between(found, speeds(slow=[("te1", "te2"), ("te3", "te4")]), 1, 4)) == 16.0


def test_a_link_counts_by_its_slower_direction():
    one_way = speeds() | {("te2", "te1"): 1.0}
    assert in_a_row(NAMES, one_way, 1, 4)[1] != "te2"


def test_between_two_copies_of_the_model_a_slow_link_does_no_harm():
    slow = speeds(slow=[("te2", "te3")])
    assert in_a_row(NAMES, slow, 1, 2) == NAMES
    assert in_a_row(NAMES, slow, 1, 4) != NAMES
    assert in_a_row(NAMES, slow, 2, 4) == NAMES, "two ranks a node: a copy ends with every second one"


@pytest.mark.parametrize(
    "gbit_s",
    [speeds(), speeds() | {("te1", "te2"): 15.9}, {("te1", "te2"): 16.0}, {}],
    ids=["all alike", "as good as alike", "not all measured", "nothing measured"],
)
def test_without_a_reason_nodes_stand_as_they_are_listed(gbit_s):
    assert in_a_row(NAMES, gbit_s, 1, 4) == NAMES


def test_of_more_than_eight_nodes_not_every_order_is_tried():
    many = tuple(f"te{n}" for n in range(9))
    assert in_a_row(many, {pair: 1.0 + (pair[0] < pair[1]) for pair in permutations(many, 2)}, 1, 9) == many


@pytest.mark.parametrize("strategy", ["pipeline", "zero3"])
def test_a_start_takes_the_order_from_the_newest_check_of_these_nodes(tmp_path: Path, monkeypatch, capsys, strategy):
    monkeypatch.chdir(tmp_path)
    head = HereHead(tmp_path / "runs")
    pairs = [{"from": a, "to": b, "gbit_s": g} for (a, b), g in speeds(slow=[("te1", "te2")]).items()]
    for day, measured in ((1, []), (2, pairs)):
        folder = head.runs / f"check-2026010{day}-000000"
        folder.mkdir(parents=True)
        check = {"run_id": folder.name, "time": float(day), "backend": "nccl", "world_size": 4, "cluster": "mine"}
        (folder / "result.json").write_text(
            json.dumps(check | {"nodes": [], "checks": [], "sweep": [], "pairs": measured})
        )
    hosts = tuple(Host(name, f"10.0.0.{n}", 1) for n, name in enumerate(NAMES))
    launch = Launch("r", "/data/runs/r", hosts, "training.node.finetune", (), "python", {})
    recipe = load_recipe("qwen2.5-14b", {"strategy": strategy, "pipeline.stages": "4"})
    nodes = [NodeHardware(host.name, 1, (Card("NVIDIA A10", 24e9),), 60e9) for host in hosts]
    found = preparing.in_stage_order(cluster_of(head), launch, recipe, nodes)
    if strategy == "zero3":
        assert found == launch
        return
    assert found.hosts[0] == hosts[0] and found.hosts[1].name != "te2" and set(found.hosts) == set(hosts)
    said = capsys.readouterr().out
    assert "the slowest link between two has 16 Gbit/s, 2 as the nodes are listed (check-20260102-000000)" in said
