"""What `fab plan` says of another way to compute, and never takes: it changes what is learned. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from training.cost.memory import micro_batch_tokens
from training.laptop import next_step
from training.laptop.plan_options import PlanQuestion
from training.plan import slow_link
from training.plan.four_bits import SETTING, Rounded, much_faster
from training.plan.options import Choice, Option, Search
from training.recipe import with_changes


def advice(asked: PlanQuestion, choice: Choice) -> Iterator[str]:
    """A sentence each."""
    if choice.chosen is None:
        return
    yield from _sparing(asked, choice, choice.chosen)
    if faster := _four_bits(asked, choice):
        yield faster.sentence(next_step.in_four_bits_too(asked))


def four_bits_values(asked: PlanQuestion, choice: Choice) -> dict[str, Any] | None:
    """For programs: what four bits a weight would win; None where they would not much."""
    if (faster := _four_bits(asked, choice)) is None:
        return None
    how = {"set": SETTING, "command": next_step.in_four_bits_too(asked)}
    return {**how, "times_as_fast": faster.times, "option": asdict(faster.option)}


def _sparing(asked: PlanQuestion, choice: Choice, chosen: Option) -> Iterator[str]:
    """What would spare a slow network, of the strategy to take or of another one that fits."""
    rates = asked.machines.rates.at_precision(asked.recipe.dtype, asked.machines.card is not None)
    for option in (chosen, *(each for each in choice.options if each.fits and each != chosen)):
        recipe = with_changes(asked.recipe, **option.values)
        tokens = micro_batch_tokens(recipe, asked.size.work.longest if asked.size else recipe.row_length)
        at = (asked.shape, asked.machines.ranks, tokens, rates)
        span = asked.size.work.span if asked.size else None
        corrected = asked.machines.corrections.of(option.strategy, recipe.dtype, recipe.tuning)
        factor = corrected.factor if corrected else 1.0
        taken = (chosen.step_s, chosen.strategy)
        if said := slow_link.advice(recipe, *at, span=span, factor=factor, taken=taken):
            yield said
            if option != chosen:
                return


def _four_bits(asked: PlanQuestion, choice: Choice) -> Rounded | None:
    """Where they would be much faster, and nobody has said what the frozen layers are kept in."""
    work = asked.size.work if asked.size else None
    search = Search(asked.shape, asked.recipe, asked.machines, work, asked.wish.free)
    return None if "base_precision" in asked.wish.named else much_faster(search, choice.chosen)
