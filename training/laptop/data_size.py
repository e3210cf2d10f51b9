"""How many tokens data have, before anything is shipped: counted where the base model's tokenizer is on this machine,
else estimated from their characters."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any

from inventory.settings import Settings
from training.cost.memory import data_disk_gib, file_bytes
from training.cost.shape import ModelShape
from training.data.build import TRAIN, Build
from training.data.encode import Encoder
from training.data.hub import HubDataSet
from training.data.look.take import load_tokenizer
from training.data.prepared import pack
from training.data.probe import words_of
from training.data.readers import none_in, records
from training.data.sample import CURE, Bad, DataError, NothingLeftError
from training.data.shapes import Record, refuse_other_goal
from training.data.source import Data, data_of, given
from training.data.statistics import DataStatistics
from training.data.survey import quiet
from training.laptop.small_files import CONFIG, TOKENIZER
from training.models import tiny
from training.models.folder import TOKENIZERS
from training.plan.machines import Workload
from training.recipe.base import TINY
from training.recipe.recipe import Recipe
from training.text.counts import size_text
from training.text.files import model_files

BYTES_A_TOKEN = 4.0
"""Of text in UTF-8: English has about four letters a token, Chinese one and a half characters of three bytes."""
TURN_TOKENS = 5
"""What a chat template puts around a turn."""
MOST_BYTES_A_TOKEN = 8
"""Of text; what is longer than a row by that is cut."""
LEAST = 2
"""Records that are prepared at least, where there are so many: one may be held out."""
SAMPLE_BYTES = 2_000_000
"""So much of the text that is not cut is prepared as for a run; the rest is reckoned by what that gave."""
MOST_READ = 4
"""Times as much text is read for it, where records are longer than a row: a tokenizer reads two megabytes a second."""


@dataclass(frozen=True)
class Size:
    """What the data come to, and how that is known."""

    work: Workload
    records: int
    """To learn from; of preferences pairs."""
    how: str


def size_of(data: Sequence[str], recipe: Recipe, skip_bad: bool = False) -> Size | None:
    """Of files and folders; None where no data are given and the recipe has none of its own. With `skip_bad` without
    the records that cannot be used. Raises DataError."""
    source = given(data)
    if isinstance(source, HubDataSet):
        raise DataError(f"--data {source}: a data set of the Hub is counted on the head; leave it out, or name a file")
    if source:
        return _counted(data_of(source), recipe, skip_bad)
    if recipe.base_model != TINY:
        return None
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_data(path := Path(folder) / "train.jsonl", recipe.goal)
        return _counted(data_of(path), recipe)


def _counted(data: Data, recipe: Recipe, skip_bad: bool = False) -> Size:
    bad = Bad(skip_bad, cure=CURE)
    sizes: list[tuple[int, int]] = []
    for _, record in records(data, bad):
        refuse_other_goal(record.shape, recipe.goal)
        sides = [record, *([record.rejected] if record.rejected else [])]
        size = sum(len(text.encode()) + 1 for side in sides for text in _texts(side))
        sizes.append((size, sum(len(side.turns) for side in sides)))
    bad.refuse(len(sizes))
    if not sizes:
        raise none_in(data, bad)
    home = home_of(recipe)
    if missing() or (home is None and recipe.base_model != TINY):
        return _estimated(sizes, recipe, bad)
    return _tokenised(data, sizes, recipe, bad, loaded(home)[0])


def _tokenised(data: Data, sizes: Sequence[tuple[int, int]], recipe: Recipe, bad: Bad, tokenizer: Any) -> Size:
    """By a run's own preparation, of the first records where the text is long."""
    read = list(accumulate(size for size, _ in sizes))
    truncated = list(accumulate(min(size, MOST_BYTES_A_TOKEN * recipe.row_length) for size, _ in sizes))
    enough = min(bisect_left(truncated, SAMPLE_BYTES) + 1, bisect_left(read, MOST_READ * SAMPLE_BYTES))
    first = min(len(sizes), max(LEAST, enough))
    its = Bad(bad.skip, cure=bad.cure)
    encoder = Encoder(tokenizer, recipe.max_length, recipe.train_on, recipe.template_args)
    with tempfile.TemporaryDirectory() as folder:
        build = Build(encoder, recipe, Path(folder), its, DataStatistics(first, 0, quiet), most=first)
        try:
            report = build.run(data, content="")[TRAIN]
        except NothingLeftError:
            if first == len(sizes):
                raise
            return _estimated(sizes, recipe, bad)  # the others may be all right
    taught, in_part = (1 - recipe.validation.held_out(count) / count for count in (len(sizes), first))
    share = truncated[-1] / max(1, truncated[first - 1]) * taught / in_part
    work = Workload(ceil(share * report.rows), round(share * report.tokens), report.longest, report.attention_span)
    part = "" if first == len(sizes) else f"the first {read[first - 1] / 1e6:.0f} MB of them "
    how = f"{part}counted with the model's tokenizer"
    left_out = max(bad, its, key=lambda each: each.count).left_out
    count = round((report.pairs or report.samples) * len(sizes) / first * taught / in_part)
    return Size(work, count, "; ".join(filter(None, (how, left_out))))


def _estimated(sizes: Sequence[tuple[int, int]], recipe: Recipe, bad: Bad) -> Size:
    """By the bytes of their text."""
    lengths = [min(recipe.row_length, round(size / BYTES_A_TOKEN) + TURN_TOKENS * turns) or 1 for size, turns in sizes]
    kept_out = recipe.validation.held_out(len(lengths))
    share = 1 - kept_out / len(lengths)
    tokens = sum(lengths)
    rows = len(pack(lengths, recipe.row_length)) if recipe.batching == "packed" else len(lengths)
    span = sum(length * length for length in lengths) / tokens
    work = Workload(max(1, round(share * rows)), round(share * tokens), max(lengths), span)
    how = "estimated: four bytes of text a token"
    return Size(work, len(lengths) - kept_out, "; ".join(filter(None, (how, bad.left_out))))


def _texts(record: Record) -> Iterator[str]:
    if record.tools:
        yield json.dumps(record.tools)
    if record.turns:
        yield from (text for turn in record.turns for _, text in words_of(turn))
    else:
        yield record.prompt + record.completion


NEEDED = ("transformers", "tokenizers", "numpy")


def missing() -> list[str]:
    """Packages that tokenising needs and this Python lacks."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def home_of(recipe: Recipe) -> Path | None:
    """The folder on this machine that has a model's tokenizer and config.json whole; `tiny` needs none."""
    if recipe.base_model.folder:
        return recipe.base_model.folder
    own = Path.home() / ".cache" / "spotune" / "models" / recipe.model_dir
    if (own / TOKENIZER).is_file() and (own / CONFIG).is_file() and model_files(own, TOKENIZERS):
        return own
    return None if recipe.base_model == TINY else _in_hub_cache(recipe)


def loaded(home: Path | None) -> tuple[Any, Mapping[str, Any]]:
    """Tokenizer and config.json; those of `tiny` without its folder, which takes a minute and torch to make. Raises
    DataError."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch here is no news
    if home is None:
        return tiny.tokenizer(), tiny.LIMITS
    try:
        config = json.loads((home / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{home / CONFIG} cannot be read: {error}") from error
    return load_tokenizer(home), config


def _in_hub_cache(recipe: Recipe) -> Path | None:
    """In the cache of huggingface_hub; only with a chat template, as parts of a snapshot may be missing there."""
    from huggingface_hub import try_to_load_from_cache

    repo, files = recipe.base_model.name, (TOKENIZER, CONFIG)
    cached = [try_to_load_from_cache(repo, name, revision=recipe.revision) for name in files]
    if not all(isinstance(path, str) for path in cached):
        return None
    folder = Path(str(cached[0])).parent
    if not model_files(folder, TOKENIZERS):
        return None
    inside = (folder / TOKENIZER).read_text(encoding="utf-8")
    return folder if '"chat_template"' in inside or (folder / "chat_template.jinja").is_file() else None


def too_small(settings: Settings, recipe: Recipe, shape: ModelShape) -> tuple[str, ...]:
    """A sentence with the size to ask for; none where the disk is large enough, or is not rented."""
    if not settings.is_rented or recipe.base_model == TINY:
        return ()
    own, need = settings.rental, data_disk_gib(shape, recipe)
    if own.data_disk_gib >= need:
        return ()
    files = f"its files need {size_text(file_bytes(shape))} on the data disk"
    return (f"{files}, {own.key('data_disk_gib')} = {own.data_disk_gib}: with environment and checkpoints {need}",)
