"""Prepared data from records: encoded in passing, never all in memory, and kept by what they were made from."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import random
import shutil
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from training.data.encode import Encoder
from training.data.encoded import Encoded, encoded
from training.data.look.content import LOOK, surveyed
from training.data.prepared import SUMS, Prepared, Writer, open_prepared
from training.data.readers import mixed, raws, together
from training.data.report import DataReport
from training.data.sample import Bad, DataError, NothingLeftError
from training.data.source import Data, data_sha256
from training.data.statistics import DataStatistics
from training.data.survey import quiet, survey
from training.data.template import generation_ends
from training.data.workers import in_order, processes_for
from training.recipe.recipe import Recipe
from training.recipe.tables import Validation
from training.text.files import drop_unused, half_made, mark_used, sha256_of

VERSION = 11
"""Of what these modules make of the same data: raised when that changes, so that older caches are not used."""
TRAIN, VALIDATION = "train", "validation"
DECIDING = ("transformers", "tokenizers", "jinja2")
"""Packages whose version may change what becomes of a text."""


def held_out(records: int, seed: int, validation: Validation) -> frozenset[int]:
    """The numbers of the records that are kept out of training: those that a draw by seed and number puts first."""

    def draw(number: int) -> float:
        return random.Random(f"{seed}/validation/{number}").random()

    return frozenset(heapq.nsmallest(validation.held_out(records), range(records), key=draw))


def content_hash(data_hash: str, tokenizer: Any, recipe: Recipe) -> str:
    """What the prepared data are made from: the same hash, the same arrays. Of the tokenizer it takes what was loaded,
    as the same files make another one under another class or version."""
    made_from = {
        "version": VERSION,
        "packages": {name: metadata.version(name) for name in DECIDING},
        "data": data_hash,
        "tokenizer": {
            "class": type(tokenizer).__name__,
            "does": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "template": tokenizer.chat_template,
            "ends": generation_ends(tokenizer),
        },
        "recipe": recipe.data_settings(),
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def pad_id(tokenizer: Any, recipe: Recipe) -> int:
    """The token that fills up, by the recipe or the tokenizer; its own end of text where it has none."""
    if recipe.pad_token is not None:
        token_id = tokenizer.get_vocab().get(recipe.pad_token)
        if token_id is None:
            raise DataError(f"pad_token {recipe.pad_token!r} is no token of {recipe.model_dir}")
        return int(token_id)
    token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if token_id is None:
        raise DataError(f"the tokenizer of {recipe.model_dir} has no pad and no end-of-text token; set pad_token")
    return int(token_id)


@dataclass
class Build:
    """One pass over the records, into a folder for training and, if asked for, one for validation."""

    encoder: Encoder
    recipe: Recipe
    folder: Path
    bad: Bad
    statistics: DataStatistics
    most: int | None = None
    """Of the good records the first so many alone."""
    shape: str = ""
    teaches_end: bool = False

    def run(self, data: Data, content: str) -> dict[str, DataReport]:
        """The report of each part. DataError where there are bad records, unless they are skipped, or nothing to learn
        from."""
        parts = (TRAIN, VALIDATION) if self.recipe.validation.fraction else (TRAIN,)
        self._writers = {
            part: Writer(self.folder / part, self.recipe.row_length, self.recipe.batching, pairs=self.recipe.is_dpo)
            for part in parts
        }
        self._take_all(data)
        self.bad.refuse(sum(writer.records for writer in self._writers.values()))
        for part, writer in self._writers.items():
            if not writer.samples:
                raise NothingLeftError(self._nothing(data.name, part, writer))
        facts = self._facts(content)
        return {part: writer.finish(facts) for part, writer in self._writers.items()}

    def _take_all(self, data: Data) -> None:
        """Every record in its order. DataError where they are not all of one shape, which the goal learns from."""
        work = partial(encoded, encoder=self.encoder, recipe=self.recipe)
        pieces = in_order(work, together(raws(data.files), self.most), 1 if self.most else processes_for(data.files))
        validation, number = held_out(self.statistics.expected, self.recipe.seed, self.recipe.validation), 0
        for one in chain.from_iterable(pieces):
            if one.shape:
                if self.shape and one.shape != self.shape:
                    self.bad.refuse(number)
                    raise DataError(mixed(one.where, one.shape, self.shape))
                self.shape = one.shape
            if one.refused:
                raise one.refused
            part = VALIDATION if number in validation else TRAIN
            self.statistics.take(one, part == VALIDATION)
            if one.bad:
                self.bad.add(one.where, one.bad)
            else:
                self._write(one, part)
            number += bool(one.shape)
            if number == self.most:
                return

    def _write(self, one: Encoded, part: str) -> None:
        writer, cut = self._writers[part], [bool(tokens) for _, tokens in one.samples]
        learnable = [sample for sample, _ in one.samples if sample.learned]
        writer.records += 1
        writer.truncated += any(cut) if self.recipe.is_dpo else sum(cut)
        writer.empty += not learnable
        for sample in learnable:
            writer.add(sample)
        self.teaches_end = self.teaches_end or one.teaches_end

    def _nothing(self, name: str, part: str, writer: Writer) -> str:
        fraction = self.recipe.validation.fraction
        if part == VALIDATION and not writer.records:
            why = "there is 1 alone" if self.statistics.expected < 2 else "those held out are bad"
            reason = f"validation.fraction {fraction:g} leaves no record for validation, as {why}"
            return f"{name}: {reason}; --set validation.fraction=0 keeps none out"
        if not writer.records and any(other.records for other in self._writers.values()):
            return f"{name}: validation.fraction {fraction:g} leaves no record to train on; use a smaller one"
        if not writer.records:
            return f"{name}: no record to train on"
        return f"{name}: no record for {part} has anything to learn within {self.recipe.max_length} tokens"

    def _facts(self, content: str) -> dict[str, Any]:
        template, tokenizer, end = self.encoder.template, self.encoder.tokenizer, self.encoder.end_id
        return {
            **self.statistics.facts(self.recipe.max_length),
            "content_hash": content,
            "shape": self.shape,
            "bad": self.bad.count,
            "template": template is not None,
            "end_of_turn": None if end is None else tokenizer.convert_ids_to_tokens(end),
            "end_of_turn_id": end,
            "end_of_turn_learned": self.teaches_end,
            "pad_id": pad_id(tokenizer, self.recipe),
            "eos_id": tokenizer.eos_token_id,
            "settings": self.recipe.data_settings(),
        }


def cached(data: Data, encoder: Encoder, recipe: Recipe, *, cache: Path, bad: Bad) -> Path:
    """The folder in `cache` that holds the prepared data, made where it is missing or damaged."""
    digests = {path: sha256_of(path) for path, _ in data.files}
    content = content_hash(data_sha256(data.source, digests.__getitem__), encoder.tokenizer, recipe)
    entry = cache / content
    drop_unused(other for other in cache.glob("*") if other != entry)
    if entry.exists():
        if whole(entry, recipe, bad.skip):
            mark_used(entry)
            return entry
        shutil.rmtree(entry, ignore_errors=True)
    fresh = half_made(entry)
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        data_survey = survey(data, quiet)
        Build(encoder, recipe, fresh, bad, DataStatistics(data_survey.records, 0, quiet)).run(data, content)
        files = (replace(file, sha256=digest) for file, digest in zip(data_survey.files, digests.values(), strict=True))
        data_survey = replace(data_survey, files=tuple(files))
        (fresh / LOOK).write_text(surveyed(data_survey, bad.skip).text() + "\n", encoding="utf-8")
        try:
            fresh.rename(entry)
        except OSError:  # another process has made the same meanwhile
            if not whole(entry, recipe, bad.skip):
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return entry


def whole(entry: Path, recipe: Recipe, skip_bad: bool) -> bool:
    """Whether a cached entry can be used as it is; one that was made by skipping bad records only for the same."""
    try:
        parts: list[Prepared] = [open_prepared(entry / TRAIN)]
        if recipe.validation.fraction:
            parts.append(open_prepared(entry / VALIDATION))
    except DataError:
        return False
    return skip_bad or not parts[0].report.bad


def link(entry: Path, folder: Path) -> None:
    """Put a cached entry into a run's folder, which must be there still: a start that was given up has removed it.

    Hard links, or copies where the disk is another.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in sorted(entry.rglob("*"), key=lambda file: file.name == SUMS):
        if file.is_file():
            target = folder / file.relative_to(entry)
            target.parent.mkdir(exist_ok=True)
            try:
                os.link(file, target)
            except OSError:
                shutil.copyfile(file, target)
