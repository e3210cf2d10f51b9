"""How many tokens data have, before anything is shipped: counted where the base model's tokenizer is on this machine,
else estimated from their characters."""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import tiny
from training.data import DataError
from training.data.bad_records import CURE, Bad
from training.data.hub import is_dataset_name
from training.data.preference import refuse_other_goal
from training.data.probe import words_of
from training.data.readers import Source, none_in, paths_of, records
from training.data.shapes import Record
from training.laptop.base_model import BUILT_IN
from training.plan.machines import Workload
from training.recipe import Recipe

BYTES_A_TOKEN = 4.0
"""Of text in UTF-8: English has about four letters a token, Chinese one and a half characters of three bytes."""
TURN_TOKENS = 5
"""What a chat template puts around a turn."""
SAMPLE_BYTES = 2_000_000
"""So much of the text is tokenised; the rest is reckoned by what that gave."""
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Size:
    """What the data come to, and how that is known."""

    work: Workload
    records: int
    how: str


def size_of(data: Sequence[str], recipe: Recipe, skip_bad: bool = False) -> Size | None:
    """Of files and folders; None where no data are given and the recipe has none of its own. With `skip_bad` without
    the records that cannot be used. Raises DataError."""
    if from_hub := next(filter(is_dataset_name, data), ""):
        raise DataError(
            f"--data {from_hub}: a data set of the Hub is counted on the head; leave it out, or name a file"
        )
    if data:
        return _counted(paths_of(data), recipe, skip_bad)
    if recipe.base_model != BUILT_IN:
        return None
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_data(path := Path(folder) / "train.jsonl", recipe.goal)
        return _counted(path, recipe)


def _counted(source: Source, recipe: Recipe, skip_bad: bool = False) -> Size:
    bad, tokenizer = Bad(skip_bad, cure=CURE), _tokenizer(recipe)
    sizes: list[tuple[int, int]] = []
    sample: list[str] = []
    sampled = 0
    for _, record in records(source, bad):
        refuse_other_goal(record.shape, recipe.goal)
        sides = [record, *([record.rejected] if record.rejected else [])]
        text = "\n".join(text for side in sides for text in _texts(side))
        size = len(text.encode())
        sizes.append((size, sum(len(side.turns) for side in sides)))
        if sampled < SAMPLE_BYTES:
            sampled += size
            sample.append(text)
    bad.refuse(len(sizes))
    if not sizes:
        raise none_in(source, bad)
    ratio, how = 1 / BYTES_A_TOKEN, "estimated: four bytes of text a token"
    if tokenizer:
        ratio = sum(len(each.ids) for each in tokenizer.encode_batch(sample, add_special_tokens=False)) / max(
            1, sampled
        )
        part = "" if len(sample) == len(sizes) else f"the first {sampled / 1e6:.0f} MB of them "
        how = f"{part}counted with the model's tokenizer"
    how = "; ".join(filter(None, (how, bad.left_out)))
    lengths = [min(recipe.row_length, round(size * ratio) + TURN_TOKENS * turns) for size, turns in sizes]
    tokens = sum(lengths)
    rows = math.ceil(tokens / recipe.row_length) if recipe.batching == "packed" else len(lengths)
    kept_out = round(rows * recipe.validation.fraction)
    span = sum(length * length for length in lengths) / max(1, tokens)
    return Size(Workload(max(1, rows - kept_out), tokens, max(lengths), span), len(lengths), how)


def _texts(record: Record) -> Iterator[str]:
    if record.tools:
        yield json.dumps(record.tools)
    if record.turns:
        yield from (text for turn in record.turns for _, text in words_of(turn))
    else:
        yield record.prompt + record.completion


def _tokenizer(recipe: Recipe) -> Any | None:
    """None where the tokenizer, or what reads it, is not on this machine."""
    if importlib.util.find_spec("tokenizers") is None or (file := _tokenizer_file(recipe)) is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def _tokenizer_file(recipe: Recipe) -> Path | None:
    own = Path.home() / ".cache" / "spotune" / "models" / recipe.model_dir / TOKENIZER
    if own.is_file():
        return own
    if recipe.base_model == BUILT_IN:
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(recipe.base_model, TOKENIZER, revision=recipe.revision)
    return Path(cached) if isinstance(cached, str) else None
