"""A recipe's text for a base model of a known shape: its keys by the model's size, its memory computed. Pure.

Rates of learning are what is usual for LoRA at these sizes; nothing was tuned for any one model.
"""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from training.cost.memory import file_bytes, micro_batch_tokens, with_reserve
from training.cost.shape import ModelShape
from training.cost.strategies import cost_of
from training.recipe.base import Base
from training.recipe.recipe import LEANEST, SIMPLEST, Recipe
from training.recipe.tables import NF4
from training.run.folder import recipe_of, run_of
from training.text.counts import decimals

NUMBERS = {1: "one", 2: "two", 4: "four", 8: "eight"}
"""Of GPUs that memory is told for."""
CARD = 80e9
"""Bytes of the largest card that most can rent."""
STEP = 0.5e9
WIDTH = 120
LENGTH = 2048
MERGED = "merged"
"""What a run's folder calls its merged model."""
MIDDLE, LARGE = 10e9, 40e9
"""Parameters from which on a model is trained more gently."""
EPOCHS, FEW_EPOCHS = 3, 2
"""Of a small model, and from MIDDLE on."""


@dataclass(frozen=True)
class Source:
    """Where a base model is from, and how far it reads."""

    base: Base
    positions: int = sys.maxsize
    """max_position_embeddings."""
    licence: str = ""
    """As its page says."""
    note: str = ""
    """A sentence for whoever opens the recipe."""
    typed: str = ""
    """What stands behind --model where that is not the recipe's name: a folder's path, an id without a recipe."""
    pad_token: str = ""
    """What fills up, where the tokenizer names nothing."""
    lr: float | None = None
    """The rate of learning, where it is not that of models of its size."""

    @property
    def name(self) -> str:
        """Its own, as a recipe's may be; of a run's merged model that of the run's recipe, by which it is known."""
        folder = self.base.folder
        if folder and folder.name == MERGED and (run_id := run_of(folder)):
            return f"{recipe_of(run_id)}-{MERGED}"
        return self.base.own_name


def new_recipe(name: str, source: Source, shape: ModelShape | None) -> str:
    """The file's whole text. Without a shape, which takes torch to count, it is that of a small model, uncommented."""
    if shape is None:
        return _keys(_bare(name, source, _epochs(0)), source, 0)
    recipe = _bare(name, source, _epochs(shape.matmul_parameters))
    note = [source.note] if source.note else []
    note += [f"The model reads at most {source.positions} tokens."] if source.positions <= 2 * LENGTH else []
    note += _adapted(recipe, shape)
    header = comment(recipe, shape, [line for words in note for line in _wrapped(words)], source.typed)
    return f"{header}\n{_keys(recipe, source, shape.matmul_parameters)}"


def _epochs(size: int) -> int:
    return FEW_EPOCHS if size >= MIDDLE else EPOCHS


def _bare(name: str, source: Source, epochs: int) -> Recipe:
    """What memory is computed for."""
    return Recipe(
        name=name,
        base_model=source.base,
        model_dir=source.base.place,
        max_length=min(LENGTH, source.positions),
        global_batch=16,
        epochs=epochs,
    )


def _keys(recipe: Recipe, source: Source, size: int) -> str:
    """What stands below the comment. `size`: parameters, of a mixture those that a token meets."""
    usual, save_every = ("2e-4", 50) if size < MIDDLE else ("1e-4" if size < LARGE else "5e-5", 25)
    pad = f"\npad_token = {json.dumps(source.pad_token, ensure_ascii=False)}" if source.pad_token else ""
    return f"""\
name = {json.dumps(recipe.name)}
base_model = {json.dumps(str(source.base), ensure_ascii=False)}
licence = {json.dumps(source.licence, ensure_ascii=False)}
revision = "main"
model_dir = {json.dumps(source.base.place)}

max_length = {recipe.max_length}{pad}
global_batch = 16
micro_batch = "auto"
epochs = {recipe.epochs:g}
seed = 0
dtype = "bfloat16"
save_every = {save_every}
keep_checkpoints = 3
gradient_checkpointing = "auto"
strategy = "auto"

[lora]
rank = 16
alpha = 32
dropout = 0.0

[optimizer]
lr = {usual if source.lr is None else source.lr}
warmup_steps = 10
schedule = "cosine"
"""


def comment(recipe: Recipe, shape: ModelShape, note: Sequence[str], typed: str = "") -> str:
    """What a recipe's file begins with: what it needs, the lines of `note`, how it is started: with `typed`, else by
    its name."""
    use = f"  fab train --model {shlex.quote(typed or recipe.name)} --data FILE"
    uses = [use, f"{use} --set {_four_bits(recipe, shape) or 'lora.rank=32'}"]
    return "".join(f"{f'# {line}'.rstrip()}\n" for line in [*memory_lines(recipe, shape), *note, "", *uses]) + "\n"


def _adapted(recipe: Recipe, shape: ModelShape) -> list[str]:
    """Which modules LoRA adapts, by the last part of their names."""
    paths = [path for layer in shape.kinds for path in layer.targets(recipe.lora)]
    names = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    experts = "; the routed experts with lora.experts = true" if shape.mixture else ""
    return [f"LoRA adapts {names} (lora.targets names others){experts}."] if names else []


def memory_lines(recipe: Recipe, shape: ModelShape) -> list[str]:
    """What a recipe's first comment says of memory."""
    (most, size), *others = needs(recipe, shape)
    least = (
        f"Needs at least about {gigabytes(size)} GB of GPU memory a GPU at {recipe.max_length} tokens on {most} GPUs"
    )
    least += "".join(f", {gigabytes(size)} GB on {number}" for number, size in others)
    downloads = "" if recipe.base_model.folder else f" Downloads {decimals(file_bytes(shape) / 1e9)} GB."
    return _wrapped(
        f"{least} (computed, not measured): {LEANEST}, every layer computed again. Where there is more, the plan of a "
        f"start takes what is faster.{downloads}"
    )


def needs(recipe: Recipe, shape: ModelShape) -> list[tuple[str, float]]:
    """Numbers of GPUs with the bytes each of them needs, the most GPUs first; once where all need about the same."""
    lean = recipe.model_copy(update={"strategy": LEANEST, "micro_batch": 1, "gradient_checkpointing": True})
    sizes = {count: _needed(lean, shape, count) for count in NUMBERS}
    counts = [count for count in ((4, 2, 1) if sizes[4] <= CARD / 4 else (8, 4, 2)) if sizes[count] <= CARD]
    if max(sizes.values()) - min(sizes.values()) <= 2 * STEP:
        return [("any number of", max(sizes.values()))]
    return [(NUMBERS[count], sizes[count]) for count in counts]


def _needed(recipe: Recipe, shape: ModelShape, ranks: int) -> float:
    memory = cost_of(recipe).memory(shape, recipe, ranks, micro_batch_tokens(recipe, recipe.max_length))
    return with_reserve(memory.held(gpu=True), gpu=True)


def _four_bits(recipe: Recipe, shape: ModelShape) -> str:
    """How it fits one card of 20 GB or more, where it would not in 16 bits and does in four; else empty."""
    lean = {"strategy": SIMPLEST, "micro_batch": 1, "gradient_checkpointing": True}
    in_full = recipe.model_copy(update=lean)
    in_four = in_full.model_copy(update={"base_precision": NF4})
    if cost_of(in_four).misfit(shape, in_four, 1):
        return ""
    whole, packed = _needed(in_full, shape, 1), _needed(in_four, shape, 1)
    if whole <= CARD / 4 or packed > CARD:
        return ""
    return f"base_precision=nf4    # {gigabytes(packed)} GB: one card is enough"


def gigabytes(size: float) -> str:
    """Rounded up, as memory is told here."""
    return f"{STEP * -(-size // STEP) / 1e9:g}"


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, WIDTH - 2, break_on_hyphens=False)  # ids stay whole
