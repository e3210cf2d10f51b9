"""The figures of docs/map.md are what the plan computes today, each of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.plan.test_options import a10s, by_name, options, tcp
from training.cost.cards import CARDS, Rates, card_bytes, memory_rate, sustained_flops
from training.cost.shape import flops_per_token, known_shape
from training.models.names import load_recipe
from training.plan.machines import room
from training.plan.notes import FOUR_BITS_WORTH

TEXT = (Path(__file__).parents[3] / "docs" / "map.md").read_text(encoding="utf-8")
LINES = TEXT.splitlines()
GROWTH = [re.match(r"\| (\d+)B, (\d+) \|(.*)\|$", line) for line in LINES]
GROWTH = [(int(row[1]), int(row[2]), row[3].split("|")) for row in GROWTH if row]
MAP = [re.match(rf"\| ({'|'.join(CARDS)}), (\d+)B \|(.*)\|$", line) for line in LINES]
MAP = [(row[1], int(row[2]), row[3].split("|")) for row in MAP if row]
PACKED = [re.match(r"\| (\d+B|[a-z][\w.-]+) on (\d+) A10 \| (.*) \| (.*) \|$", line) for line in LINES]
PACKED = [(row[1], int(row[2]), row[3], row[4]) for row in PACKED if row]
STRATEGIES = ("zero0", "zero3", "pipeline")


def machines(card, ranks, gbit):
    has = card_bytes(card)
    usable, spare = room(has, gpu=True)
    rates = Rates(sustained_flops(card), tcp(gbit))
    return replace(a10s(ranks, None), card=card, card_bytes=has, usable_bytes=usable, spare_bytes=spare, rates=rates)


def figure(option):
    return f"{option.tokens_per_s:,.0f}" if option.fits else "-"


def named(option):
    return option.strategy if option.split is None else f"{option.strategy} {option.split.stages}x{option.copies}"


@pytest.mark.parametrize(("model", "ranks", "cells"), GROWTH)
def test_the_table_of_a10s_is_what_is_computed(model, ranks, cells):
    for gbit, cell in zip((1, 5, 16, 100), cells, strict=True):
        found = options(f"qwen2.5-{model}b", machines("A10", ranks, gbit))
        chosen = found.chosen
        best = f"**{figure(chosen)}** ({named(chosen)}, {chosen.micro_batch}, {chosen.checkpointed})"
        assert cell.strip() == f"{figure(found.as_it_stands)} -> {best}"


@pytest.mark.parametrize(("model", "ranks", "sixteen", "four"), PACKED)
def test_the_table_of_four_bits_is_what_is_computed(model, ranks, sixteen, four):
    found = machines("A10", ranks, 16)
    found = replace(found, rates=replace(found.rates, memory_bytes_per_s=memory_rate("A10")))
    name = f"qwen2.5-{model.lower()}" if model[0].isdigit() else model
    for cell, changes in ((sixteen, {}), (four, {"base_precision": "nf4", "strategy": "zero2"})):
        chosen = options(name, found, **changes).chosen
        best = chosen and f"{figure(chosen)} ({named(chosen)}, {chosen.micro_batch}, {chosen.checkpointed})"
        assert cell == (best or "-")


@pytest.mark.parametrize(("card", "model", "cells"), MAP)
def test_the_map_of_cards_is_what_is_computed(card, model, cells):
    for gbit, cell in zip((1, 16, 100), cells, strict=True):
        found = options(f"qwen2.5-{model}b", machines(card, 4, gbit))
        rows = [by_name(found)[name] for name in STRATEGIES]
        said = [f"**{figure(row)}**" if row == found.chosen else figure(row) for row in rows]
        assert cell.strip() == " / ".join(said)


def test_the_map_is_of_seven_cards_four_models_and_no_row_that_fits_is_left_out():
    assert len({card for card, *_ in MAP}) == 7 and len(MAP) == 28
    assert [(model, ranks) for model, ranks, _ in GROWTH] == [
        *((3, ranks) for ranks in (1, 2, 4, 8)),
        *((7, ranks) for ranks in (1, 2, 4, 8)),
        *((14, ranks) for ranks in (2, 4, 8)),
        *((32, ranks) for ranks in (4, 8)),
    ]


def left_out(start):
    """Tokens/s that the table says of a strategy that spotune has not."""
    (row,) = [line.split("|")[2:5] for line in LINES if line.startswith(f"| {start}")]
    return [cell.strip() for cell in row]


def test_what_was_left_out_would_do_what_the_table_says():
    recipe, ranks = load_recipe("qwen2.5-14b"), 4
    shape = known_shape(recipe.base_model)
    facts = shape.facts(recipe)

    def tensor(link, tokens=2048):
        summed = 4 * 2 * (ranks - 1) / ranks * 2 * shape.hidden * shape.layers * tokens
        assert summed / 1e9 == pytest.approx(6, abs=0.1)
        return tokens / (flops_per_token(facts, 2048, 0)[1] * tokens / ranks / 40e12 + summed / link)

    def eight_bits(link, tokens):
        computing = flops_per_token(facts, 2048, 1)[1] * tokens / 40e12
        gathering = (ranks - 1) / ranks * (1.95 * facts.parameters + 4 * facts.trainable) / link
        return ranks * tokens / (max(computing, gathering) + 0.2 * min(computing, gathering))

    links = [tcp(gbit) for gbit in (1, 16, 100)]
    assert left_out("tensor parallel") == [f"{tensor(link):,.0f}" for link in links]
    best = [max(eight_bits(link, 2048 * rows) for rows in (1, 2, 4)) for link in links]
    assert left_out("ZeRO++") == [f"{each:,.0f}" for each in best]
    (row,) = [cells for card, model, cells in MAP if (card, model) == ("A10", 14)]
    assert "1,737, 2,037 and 2,049" in TEXT and [cell.split("**")[1] for cell in row] == ["1,737", "2,037", "2,049"]
    assert 2 * facts.trainable / flops_per_token(facts, 2048, 0)[1] == pytest.approx(0.002, abs=0.0005)


def test_where_four_bits_win_much_is_shown_beside_where_they_win_little():
    def per_s(cell):
        return float(cell.split(" ")[0].replace(",", ""))

    times = {(model, ranks): per_s(four) / per_s(sixteen) for model, ranks, sixteen, four in PACKED if sixteen != "-"}
    much = {key for key, each in times.items() if each > FOUR_BITS_WORTH}
    assert {model for model, _ in much} == {
        *("gpt-oss-20b", "deepseek-v2-lite", "phi4-14b", "gemma4-26b-a4b", "mistral-small3.2-24b")
    }
    assert 20 < max(times.values()) < 21, "as training/plan/notes.py says"
