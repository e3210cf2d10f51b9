"""Each node says what it has; what a plan makes of cards of one kind, of several, and of nodes that say nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from tests.support.llama_shape import model_shape
from tests.training.plan import test_checks as plan_checks
from training.cost.memory import GIB
from training.cost.shape import known_shape
from training.laptop import open_cluster
from training.laptop.head_node import HereHead
from training.models.names import load_recipe
from training.plan.facts import (
    Card,
    Known,
    NodeHardware,
    machines_of,
    rank_cards,
    read_facts,
    slowest_first,
)
from training.plan.predict import Plan, make_plan
from training.recipe.base import Base
from training.run.launch import Host, Launch

A10, L20, RTX = "NVIDIA A10", "NVIDIA L20", "NVIDIA GeForce RTX 4090"
A10_CARD, RTX_CARD = Card(A10, 23028 * 2**20), Card(RTX, 24564 * 2**20)
A100_CARD = Card("NVIDIA A100-SXM4-80GB", 81920 * 2**20)
HOSTS = tuple(Host(f"te{n}", f"10.0.0.{n}", 1) for n in range(1, 5))


def launch(*hosts: Host, **env: str) -> Launch:
    return Launch("r", "/data/runs/r", hosts, "training.node.finetune", (), "python", env)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Programs of which `ssh` runs what it is told on a node that has the cards in a file of its name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "ssh": 'shift 4; [ -f "$CARDS/$1" ] || { echo "ssh: no route to $1" >&2; exit 255; }; NODE=$1 sh -c "$2"',
        "nvidia-smi": 'cat "$CARDS/${NODE:-te1}"; ! grep -q "has failed" "$CARDS/${NODE:-te1}"',
    }
    for name, does in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    cards = tmp_path / "cards"
    cards.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CARDS", str(cards))
    return cards


def test_what_a_nodes_shell_prints_beside_its_answer_is_no_card(nodes: Path, tmp_path: Path):
    (nodes / "te1").write_text(f"{L20}, 46068\n")
    (nodes / "te2").write_text(f"{A10}, 23028\n")
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("shift 4;", "shift 4; echo Welcome to te2;") + "echo Bye\n")
    assert open_cluster.hardware_of_nodes(HereHead(tmp_path), launch(*HOSTS[:2]))[1].cards == (A10_CARD,)


def test_every_node_says_what_cards_and_ram_it_has_in_rank_order(nodes: Path, tmp_path: Path):
    for n, name in enumerate((A10, RTX, RTX, A10), start=1):
        (nodes / f"te{n}").write_text(f"{name}, 23028\n" * n)
    found = open_cluster.hardware_of_nodes(HereHead(tmp_path), launch(*HOSTS))
    assert [node.name for node in found] == ["te1", "te2", "te3", "te4"]
    assert [node.cards[0].name for node in found] == [A10, RTX, RTX, A10]
    assert [len(node.cards) for node in found] == [1, 2, 3, 4]
    assert found[0].cards[0].bytes == 23028 * 2**20
    assert {node.ram_bytes for node in found} == {os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}


def test_a_node_whose_disk_is_full_is_told_from_one_that_does_not_say(nodes: Path, tmp_path: Path):
    for name in ("te1", "te2"):
        (nodes / name).write_text(f"{A10}, 23028\n")
    for disk, free in (("", inf), (str(tmp_path / "none"), inf), ("/proc", 0.0)):
        found = open_cluster.hardware_of_nodes(HereHead(tmp_path), replace(launch(*HOSTS[:2]), data_disk=disk))
        assert [node.disk_free_bytes for node in found] == [free, free], disk


def test_a_node_that_does_not_answer_is_taken_for_one_like_the_head(nodes: Path, tmp_path: Path):
    (nodes / "te1").write_text(f"{L20}, 46068\n")
    found = open_cluster.hardware_of_nodes(HereHead(tmp_path), launch(*HOSTS[:2]))
    assert found[1] == NodeHardware("te2", 1, found[0].cards, found[0].ram_bytes)


def test_what_a_broken_driver_says_is_no_card(nodes: Path, tmp_path: Path):
    (nodes / "te1").write_text("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver, 9\n")
    (broken,) = open_cluster.hardware_of_nodes(HereHead(tmp_path), launch(HOSTS[0]))
    assert broken.cards == () and broken.ram_bytes > 0


def test_on_the_cpu_the_cards_do_not_count(nodes: Path, tmp_path: Path):
    (nodes / "te1").write_text(f"{A10}, [N/A]\n")
    assert open_cluster.hardware_of_nodes(HereHead(tmp_path), launch(HOSTS[0]))[0].cards == (Card(A10, inf),)
    (alone,) = open_cluster.hardware_of_nodes(HereHead(tmp_path), launch(HOSTS[0], DS_ACCELERATOR="cpu"))
    assert alone.cards == () and alone.ram_bytes > 0


def test_a_name_with_a_quote_in_it_is_no_command(nodes: Path, tmp_path: Path):
    (nodes / "te1").write_text(f"{A10}, 23028\n")
    hosts = (HOSTS[0], Host(f"a'; touch {tmp_path}/ran; '", "10.0.0.9", 1))
    assert len(open_cluster.hardware_of_nodes(HereHead(tmp_path), launch(*hosts))) == 2
    assert not (tmp_path / "ran").exists()


def having(*kinds: tuple[Card, ...], slots: int = 1) -> list[NodeHardware]:
    return [NodeHardware(f"te{n}", slots, cards, 60 * GIB) for n, cards in enumerate(kinds, start=1)]


def test_cards_of_one_kind_count_as_the_smallest_of_them():
    slightly = Card(A10, A10_CARD.bytes - 2**20)
    assert rank_cards(having((A10_CARD,), (slightly,))) == (slightly, slightly)
    assert rank_cards(having((A10_CARD,), (Card(A10, 12 * GIB),))) == (A10_CARD, Card(A10, 12 * GIB))
    assert rank_cards(having((A10_CARD,), (Card("A10", A10_CARD.bytes),))) == (A10_CARD, A10_CARD)
    assert rank_cards(having((), (A10_CARD,))) == (A10_CARD, A10_CARD)
    assert rank_cards(having((A10_CARD,), (RTX_CARD, A10_CARD), slots=2)) == (A10_CARD, A10_CARD, RTX_CARD, A10_CARD)
    assert rank_cards(having((), ())) == ()


def test_the_slowest_come_first_but_for_the_head():
    mixed = having((RTX_CARD,), (RTX_CARD,), (A10_CARD,), (A10_CARD,))
    assert [node.name for node in slowest_first(mixed)] == ["te1", "te3", "te4", "te2"]
    assert slowest_first(mixed[:2]) == tuple(mixed[:2])
    ordered, nodes = open_cluster.with_slowest_first(launch(*HOSTS), tuple(mixed))
    assert [host.name for host in ordered.hosts] == [node.name for node in nodes] == ["te1", "te3", "te4", "te2"]


def plan_on(*cards: Card, bytes_per_s: float | None = 1.7e9, **settings: str) -> Plan:
    outline = model_shape(plan_checks.CONFIG).to_outline()
    prepared = {"report": plan_checks.REPORT, "disk_free_gib": 300.0, "outline": outline}
    prepared |= {"model": plan_checks.CONFIG, "generation": plan_checks.INSTRUCT}
    facts = read_facts(prepared, having(*((card,) for card in cards)), Known(bytes_per_s, "check-1"))
    return make_plan(load_recipe("qwen2.5-14b", settings), facts)


def test_a_start_on_two_a10_and_two_4090_shares_the_layers_out_by_speed():
    """Facts: layers 7, 7, 18, 16 computed elsewhere for shorter rows."""
    plan = plan_on(A10_CARD, A10_CARD, RTX_CARD, RTX_CARD)
    assert plan.recipe.strategy == "pipeline" and plan.recipe.pipeline.stages == 4 and not plan.errors
    layers = plan.recipe.pipeline.layers
    assert sum(layers) == known_shape(Base.parse("Qwen/Qwen2.5-14B-Instruct")).layers
    assert layers[0] + layers[1] < 0.55 * (layers[2] + layers[3])
    assert plan.predicted["card"] == f"{A10} and {RTX}"
    alike = plan_on(A10_CARD, A10_CARD, A10_CARD, A10_CARD)
    assert plan.predicted["step_s"] < 0.7 * alike.predicted["step_s"]
    assert alike.recipe.pipeline.layers == (11, 12, 14, 11)


def test_of_several_kinds_the_memory_that_counts_is_the_card_that_is_filled_most():
    cards = (A10_CARD, A10_CARD, RTX_CARD, RTX_CARD)
    layers = {"strategy": "pipeline", "micro_batch": "1", "gradient_checkpointing": "true"}
    crowded = plan_on(*cards, **layers, **{"pipeline.layers": "[4,4,4,36]"})
    (error,) = crowded.errors
    assert error.startswith("GPU memory: ") and f"of 24.0 GiB of {RTX}" in error


def test_one_card_that_lacks_bfloat16_is_enough_to_say_so():
    old = Card("Tesla T4", 15360 * 2**20)
    plan = plan_on(A10_CARD, old, A10_CARD, A10_CARD, strategy="zero3")
    assert any(error.startswith("dtype: Tesla T4 has no bfloat16") for error in plan.errors)


def test_machines_of_several_kinds_go_by_the_weakest_of_each():
    at = machines_of((A10_CARD, RTX_CARD), 2, 1, 60 * GIB, Known(1.7e9))
    assert (at.card, at.kinds, at.card_bytes) == (A10, f"{A10} and {RTX}", A10_CARD.bytes)
    assert at.rates.flops == 40e12 and at.rates.each == (40e12, 102e12)
    assert machines_of((A10_CARD, Card("Mystery 9000", 80 * GIB)), 2, 1, 60 * GIB).rates.flops is None
