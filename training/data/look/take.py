"""Look into data under a model: the very preparation of a run, into a folder that is thrown away."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training.data import limits
from training.data.build import Build, pad_id
from training.data.encode import Encoder
from training.data.look.content import Look, surveyed, with_model
from training.data.prepared import Prepared
from training.data.sample import Bad, DataError
from training.data.source import Data
from training.data.statistics import DataStatistics
from training.data.survey import MOST_BAD, Survey, Tell
from training.recipe.recipe import Recipe

MADE_UP = 1
"""Words of its own that a tokenizer has without a file of them: Llama's has the mark of a blank."""


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder; nothing is downloaded. DataError where there is none that can be read, or one
    without its words, which transformers makes without a word where their file is missing."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise DataError(f"the tokenizer at {folder} cannot be read: {' '.join(str(error).split())[:300]}") from error
    if len(tokenizer) - len(tokenizer.get_added_vocab()) <= MADE_UP:
        raise DataError(f"the tokenizer at {folder} knows no words: is its tokenizer.json there?")
    return tokenizer


@dataclass(frozen=True)
class LookWish:
    """What is to be seen of data."""

    show: int
    """Samples."""
    skip_bad: bool
    """As if records that cannot be used were left out."""
    tell: Tell


def look_into(
    data: Data,
    survey: Survey,
    recipe: Recipe,
    tokenizer: Any,
    config: Mapping[str, Any],
    *,
    wish: LookWish,
) -> Look:
    """The look at surveyed data; `config` is the model's config.json. What a run would refuse is said in it, and
    what can be learned of the files that can be read is shown all the same."""
    look = replace(surveyed(survey, wish.skip_bad), positions=limits.positions(config))
    if look.refused and not survey.readable:
        return look
    bad, statistics = Bad(skip=True, most=MOST_BAD), DataStatistics(survey.readable_records, wish.show, wish.tell)
    reports: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            encoder = Encoder(tokenizer, recipe.max_length, recipe.train_on, recipe.template_args)
            limits.check_settings(config, recipe, tokenizer, pad_id(tokenizer, recipe), encoder.end_id)
            readable = survey.readable
            data = replace(data, files=tuple(file for file in data.files if file.name in readable))
            reports = Build(encoder, recipe, Path(folder), bad, statistics).run(data, content="")
            largest = max(Prepared(Path(folder) / part).largest_id for part in reports)
            limits.check_ids(config, recipe, tokenizer, largest)
        except DataError as error:
            look = replace(look, refused="\n".join(filter(None, [look.refused, str(error)])))
    return with_model(look, recipe, tokenizer, statistics=statistics, bad=bad, reports=reports)
