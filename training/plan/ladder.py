"""Where memory does not suffice: what to change, in the recipe's own keys, and what each change would save. Pure.

Before a run by the plan, after it by what a run that ran out of memory is told.

The steps go from the cheapest to the dearest, in speed and in what is learned. Each is counted on top of those
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from training.cost.memory import GIB, Memory, micro_batch_tokens, with_reserve
from training.cost.pipeline import stages_of
from training.cost.shape import ModelShape
from training.cost.strategies import cost_of
from training.recipe.reading import with_changes
from training.recipe.recipe import LEANEST, LEANEST_WHOLE, SIMPLEST, Recipe, RecipeError
from training.recipe.strategy_rules import PARTITIONED, needs, refused_sums
from training.recipe.tables import NF4
from training.text.counts import size_text

SHORTEST = 512
"""Tokens of a row that the ladder goes down to."""
LEAST_GIB = 0.05


@dataclass(frozen=True)
class MemoryOption:
    """One change, as `--set` takes it, with what it saves and what remains needed on the GPU."""

    settings: tuple[str, ...]
    saves_gib: float
    leaves_gib: float
    costs: str

    @property
    def command(self) -> str:
        return " ".join(f"--set {setting}" for setting in self.settings)


def memory_options(recipe: Recipe, shape: ModelShape, ranks: int, longest: int, cards: bool) -> list[MemoryOption]:
    """Changes worth trying, each on top of the ones before; none that saves nothing. `cards`: the ranks compute on
    GPUs, where Liger's kernels choose the loss's chunks themselves."""
    rungs: list[MemoryOption] = []
    current: dict[str, str] = {"strategy": recipe.strategy, "base_precision": recipe.base_precision}
    now = needed(recipe, shape, ranks, longest)
    for settings, changes, costs in _changes(recipe, ranks):
        if cards and "loss_chunk" in changes:
            continue
        if (changed := _changed(recipe, changes)) is None:
            continue
        then = needed(changed, shape, ranks, longest)
        saves = (now.total - then.total) / GIB
        if saves < LEAST_GIB:
            continue
        values = dict(setting.split("=") for setting in settings)
        overrides = tuple(f"{key}={value}" for key, value in values.items() if current.get(key) != value)
        current |= values
        rungs.append(MemoryOption(overrides, saves, with_reserve(then.held(cards), cards) / GIB, costs))
        recipe, now = changed, then
    return rungs


def needed(recipe: Recipe, shape: ModelShape, ranks: int, longest: int) -> Memory:
    """Memory where every micro-batch is as long as it can get."""
    return cost_of(recipe).memory(shape, recipe, ranks, micro_batch_tokens(recipe, longest))


def _changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe | None:
    """With some values, of tables some keys, changed; None where the recipe does not take them beside what it says."""
    values = recipe.model_dump()
    merged = {k: {**values[k], **v} if isinstance(v, dict) else v for k, v in changes.items()}
    try:
        return with_changes(recipe, **merged)
    except RecipeError:
        return None


def _changes(recipe: Recipe, ranks: int) -> Iterator[tuple[tuple[str, ...], dict[str, Any], str]]:
    """As `--set` takes it, as the recipe's values, and what it costs."""
    if recipe.micro_batch > 1:
        yield ("micro_batch=1",), {"micro_batch": 1}, "the same result in more micro-batches"
    yield from _staged_changes(recipe, ranks)
    if recipe.gradient_checkpointing is not True and not (recipe.is_pipeline and recipe.pipeline.checkpointed):
        yield ("gradient_checkpointing=true",), {"gradient_checkpointing": True}, "the same result, a third slower"
    if recipe.loss_chunk > 256:
        yield ("loss_chunk=256",), {"loss_chunk": 256}, "the same result"
    if recipe.tuning == "lora" and recipe.lora.dropout:
        yield ("lora.dropout=0",), {"lora": {"dropout": 0.0}}, "no dropout"
    divided = recipe.strategy in PARTITIONED
    may_divide = not refused_sums(recipe, LEANEST)
    if not divided and ranks > 1 and may_divide and recipe.base_precision != NF4:
        words = "the same result; the weights cross the network in every micro-batch"
        yield (f"strategy={LEANEST}",), {"strategy": LEANEST}, words
    if recipe.tuning == "full":
        yield ("tuning=lora",), {"tuning": "lora"}, "an adapter instead of every weight"
    if not recipe.offload.optimizer:
        yield ("offload.optimizer=true",), {"offload": {"optimizer": True}}, "slower steps, RAM of the nodes"
    if recipe.tuning == "lora" and recipe.base_precision != NF4 and not recipe.offload.parameters:
        own = LEANEST_WHOLE if divided or (ranks > 1 and not recipe.is_pipeline) else recipe.strategy
        words = "the frozen layers rounded to four bits each, and unpacked in every micro-batch"
        for whole in (each for each in (own, SIMPLEST) if _takes(each, recipe, base_precision=NF4)):
            yield (f"strategy={whole}", f"base_precision={NF4}"), {"strategy": whole, "base_precision": NF4}, words
            break
    length = recipe.max_length
    while length > SHORTEST:
        length = max(SHORTEST, length // 2)
        yield (f"max_length={length}",), {"max_length": length}, "longer records lose their ends"
    if not recipe.offload.parameters and may_divide:
        settings = (f"strategy={LEANEST}", "base_precision=dtype", "offload.parameters=true")
        changes = {"strategy": LEANEST, "base_precision": "dtype", "offload": {"parameters": True}}
        yield settings, changes, "much slower, RAM of the nodes"
    if recipe.tuning == "lora" and recipe.lora.dora:
        yield ("lora.dora=false",), {"lora": {"dora": False}}, "plain LoRA"


def _takes(strategy: str, recipe: Recipe, **changes: Any) -> bool:
    """Whether a strategy can run the recipe as it would be with these changes."""
    changed = _changed(recipe, {"strategy": strategy, **changes})
    return changed is not None and not needs(changed, gpu=True)


def _staged_changes(recipe: Recipe, ranks: int) -> Iterator[tuple[tuple[str, ...], dict[str, Any], str]]:
    """Of what its table says of a pipeline."""
    if not recipe.is_pipeline:
        return
    least = tuple(range(stages_of(recipe, ranks), 0, -1))
    if recipe.pipeline.held and recipe.pipeline.held != least:
        words = "the same result, slower where the network is"
        yield (f"pipeline.held={_listed(least)}",), {"pipeline": {"held": least}}, words
    if recipe.pipeline.checkpointed:
        settings = ("gradient_checkpointing=true", "pipeline.checkpointed=[]")
        changes = {"gradient_checkpointing": True, "pipeline": {"checkpointed": ()}}
        yield settings, changes, "the same result, up to a third slower"


def _listed(values: Sequence[int]) -> str:
    """As `--set` takes it, without a space that a shell would cut at."""
    return f"[{','.join(map(str, values))}]"


def ladder_lines(rungs: Sequence[MemoryOption], predicted: dict[str, Any]) -> list[str]:
    """The ladder in words, one line a step, after what was expected."""
    card = predicted.get("card_gib")
    need = size_text(with_reserve(predicted["memory_gib"] * GIB, gpu=bool(card)))
    has = f" of {size_text(card * GIB)}" if card else ""
    lines = [f"planned: {need} on the GPU{has}; to need less, from the top down:"]
    for rung in rungs:
        fits = " (fits)" if card and rung.leaves_gib <= card else ""
        saves, leaves = (size_text(gib * GIB) for gib in (rung.saves_gib, rung.leaves_gib))
        lines.append(f"  {rung.command}: {saves} less, {leaves} left{fits}; {rung.costs}")
    if not rungs:
        lines.append("  nothing in the recipe would; take a smaller model, more machines or larger cards")
    return lines
