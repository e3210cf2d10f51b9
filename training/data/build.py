"""Prepared data from records: encoded in passing, never all in memory, and kept by what they were made from."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from training.data import encode
from training.data.answers import Rendered
from training.data.encode import Encoder
from training.data.look.content import LOOK, surveyed
from training.data.look.survey import quiet, survey
from training.data.look.watch import DataStatistics, Made
from training.data.prepared import SUMS, Prepared, Writer, open_prepared
from training.data.readers import Source, called, data_sha256, records
from training.data.report import DataReport
from training.data.sample import Bad, BadRecord, DataError, NothingLeftError
from training.data.shapes import only_thinks, refuse_other_goal, thoughts_cut_off
from training.data.template import generation_ends
from training.recipe.recipe import Recipe
from training.recipe.tables import Validation
from training.text.files import drop_unused, half_made, mark_used

VERSION = 10
"""Of what these modules make of the same data: raised when that changes, so that older caches are not used."""
TOGETHER = 256
"""Texts tokenised in one call, which spreads them over the machine's cores."""
MOST_MARKS = 5
"""Special tokens that are named."""
TRAIN, VALIDATION = "train", "validation"
DECIDING = ("transformers", "tokenizers", "jinja2")
"""Packages whose version may change what becomes of a text."""


def held_out(records: int, seed: int, validation: Validation) -> frozenset[int]:
    """The numbers of the records that are kept out of training: those that a draw by seed and number puts first."""

    def draw(number: int) -> float:
        return random.Random(f"{seed}/validation/{number}").random()

    return frozenset(heapq.nsmallest(validation.held_out(records), range(records), key=draw))


def content_hash(source: Path, tokenizer: Any, recipe: Recipe) -> str:
    """What the prepared data are made from: the same hash, the same arrays. Of the tokenizer it takes what was loaded,
    as the same files make another one under another class or version."""
    made_from = {
        "version": VERSION,
        "packages": {name: metadata.version(name) for name in DECIDING},
        "data": data_sha256(source),
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


class Waiting(NamedTuple):
    """A record whose texts wait to be tokenised together with others'."""

    where: str
    part: str
    rendered: list[Rendered]


@dataclass
class Build:
    """One pass over the records, into a folder for training and, if asked for, one for validation."""

    encoder: Encoder
    recipe: Recipe
    folder: Path
    bad: Bad
    watch: DataStatistics
    files: Sequence[Path] = ()
    """Of the data, where not all are to be read."""
    most: int | None = None
    """Of the good records the first so many alone."""
    shape: str = ""
    teaches_end: bool = False
    marks: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    """Records of the whole data by what is odd about them."""

    def run(self, source: Source, content: str) -> dict[str, DataReport]:
        """The report of each part. DataError where there are bad records, unless they are skipped, or nothing to learn
        from."""
        parts = (TRAIN, VALIDATION) if self.recipe.validation.fraction else (TRAIN,)
        self._writers = {
            part: Writer(self.folder / part, self.recipe.row_length, self.recipe.batching, pairs=self.recipe.is_dpo)
            for part in parts
        }
        self._tokenised(self._rendered(source))
        self.bad.refuse(sum(writer.records for writer in self._writers.values()))
        for part, writer in self._writers.items():
            if not writer.samples:
                raise NothingLeftError(self._nothing(source, part, writer))
        facts = self._facts(content)
        return {part: writer.finish(facts) for part, writer in self._writers.items()}

    def _tokenised(self, rendered: Iterator[Waiting]) -> None:
        """Write them, TOGETHER at a time; while some are tokenised the next ones are rendered."""
        with ThreadPoolExecutor(1) as beside:
            waiting, texts, made = list[Waiting](), list[Rendered](), beside.submit(self.encoder.tokenised, ())
            while following := list(islice(rendered, TOGETHER)):
                next_texts = [text for one in following for text in one.rendered]
                tokenised = made.result()
                made = beside.submit(self.encoder.tokenised, next_texts)
                self._write(waiting, self.encoder.samples(texts, tokenised))
                waiting, texts = following, next_texts
            self._write(waiting, self.encoder.samples(texts, made.result()))

    def _rendered(self, source: Source) -> Iterator[Waiting]:
        rendered_of = encode.rendered if self.recipe.is_dpo else Encoder.rendered
        validation = held_out(self.watch.expected, self.recipe.seed, self.recipe.validation)
        for number, (where, record) in enumerate(islice(records(source, self.bad, self.files), self.most)):
            refuse_other_goal(record.shape, self.recipe.goal)
            self.shape = record.shape
            try:
                rendered = rendered_of(self.encoder, record)
            except BadRecord as error:
                self.bad.add(where, str(error))
                continue
            part = VALIDATION if number in validation else TRAIN
            sides = (record, *([record.rejected] if record.rejected else []))
            marks = {mark for side in sides for mark in self.encoder.marks(side)}
            self.marks |= marks
            self.counts["marked"] += bool(marks)
            turns = [turn for side in sides for turn in side.turns]
            self.counts["cut_thoughts"] += any(map(thoughts_cut_off, turns))
            self.counts["only_thoughts"] += any(map(only_thinks, turns))
            self.watch.seen.add(where, record, part == VALIDATION)
            yield Waiting(where, part, rendered)

    def _write(self, waiting: Iterable[Waiting], samples_made: Iterable[Made]) -> None:
        made = iter(samples_made)
        end, tokenizer = self.encoder.end_id, self.encoder.tokenizer
        unknown = None if tokenizer.unk_token_id in {end, tokenizer.eos_token_id} else tokenizer.unk_token_id
        for one in waiting:
            writer = self._writers[one.part]
            samples = [next(made) for _ in one.rendered]
            pair = [sample for sample, _ in samples] if self.recipe.is_dpo else []
            if pair and (wrong := encode.fault(pair, self.recipe.max_length)):
                self.bad.add(one.where, wrong)
                continue
            writer.records += 1
            learnable, cut = 0, [bool(tokens) for _, tokens in samples]
            writer.truncated += any(cut) if pair else sum(cut)
            for sample, _ in samples:
                if sample.learned:
                    learnable += 1
                    writer.add(sample)
                    self.teaches_end = self.teaches_end or end in sample.labels[1:]
            writer.empty += not learnable
            self.counts["unknown"] += unknown is not None and any(unknown in sample.labels[1:] for sample, _ in samples)
            self.watch.made(one.where, one.part == VALIDATION, samples, encode.SIDES if pair else ())

    def _nothing(self, source: Source, part: str, writer: Writer) -> str:
        name, fraction = called(source), self.recipe.validation.fraction
        if part == VALIDATION and not writer.records:
            why = "there is 1 alone" if self.watch.expected < 2 else "those held out are bad"
            reason = f"validation.fraction {fraction:g} leaves no record for validation, as {why}"
            return f"{name}: {reason}; --set validation.fraction=0 keeps none out"
        if not writer.records and any(other.records for other in self._writers.values()):
            return f"{name}: validation.fraction {fraction:g} leaves no record to train on; use a smaller one"
        if not writer.records:
            return f"{name}: no record to train on"
        return f"{name}: no record for {part} has anything to learn within {self.recipe.max_length} tokens"

    def _facts(self, content: str) -> dict[str, Any]:
        template, tokenizer, end = self.encoder.template, self.encoder.tokenizer, self.encoder.end_id
        lengths, repeats = self.watch.lengths(self.recipe.max_length), self.watch.seen.repeats()
        return {
            "content_hash": content,
            "shape": self.shape,
            "bad": self.bad.count,
            "duplicates": repeats.duplicates,
            "leaked": repeats.leaked,
            "marks": sorted(self.marks)[:MOST_MARKS],
            **self.counts,
            "longest_uncut": lengths.longest if lengths else 0,
            "template": template is not None,
            "end_of_turn": None if end is None else tokenizer.convert_ids_to_tokens(end),
            "end_of_turn_id": end,
            "end_of_turn_learned": self.teaches_end,
            "pad_id": pad_id(tokenizer, self.recipe),
            "eos_id": tokenizer.eos_token_id,
            "settings": self.recipe.data_settings(),
        }


def cached(source: Path, encoder: Encoder, recipe: Recipe, *, cache: Path, bad: Bad) -> Path:
    """The folder in `cache` that holds the prepared data, made where it is missing or damaged."""
    content = content_hash(source, encoder.tokenizer, recipe)
    entry = cache / content
    drop_unused(other for other in cache.glob("*") if other != entry)
    if entry.exists():
        if _whole(entry, recipe, bad):
            mark_used(entry)
            return entry
        shutil.rmtree(entry, ignore_errors=True)
    fresh = half_made(entry)
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        data_survey = survey(source, quiet)
        Build(encoder, recipe, fresh, bad, DataStatistics(data_survey.records, 0, quiet)).run(source, content)
        (fresh / LOOK).write_text(surveyed(data_survey, bad.skip).text() + "\n", encoding="utf-8")
        try:
            fresh.rename(entry)
        except OSError:  # another process has made the same meanwhile
            if not _whole(entry, recipe, bad):
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return entry


def _whole(entry: Path, recipe: Recipe, bad: Bad) -> bool:
    """Whether a cached entry can be used as it is; one that was made by skipping bad records only for the same."""
    try:
        parts: list[Prepared] = [open_prepared(entry / TRAIN)]
        if recipe.validation.fraction:
            parts.append(open_prepared(entry / VALIDATION))
    except DataError:
        return False
    return bad.skip or not parts[0].report.bad


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
