"""`fab data`: what data hold and what a model will learn of them, before anything is started. On this machine where the
model's tokenizer is here, else on the head."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from inventory.errors import InventoryError
from inventory.shown import shown
from inventory.terminal import console, table
from training.data.hub import HubDataSet, download
from training.data.look.content import Look, look_from, remarks, surveyed
from training.data.look.shown import Piece, ShownSample
from training.data.look.take import LookWish, look_into
from training.data.report import DataReport
from training.data.sample import DataError
from training.data.source import Data, can_check_here, downloaded, given, ignored_files_note
from training.data.statistics import Lengths
from training.data.survey import FileSurvey, Tell, survey
from training.laptop import data_size, new_run, preparing
from training.laptop.base_model import another_hub, download_command, find_base_model, hub_address, mirror
from training.laptop.head_node import HeadError
from training.laptop.new_run import KINDS_OF_DATA, TrainingData, files_of
from training.laptop.open_cluster import LOOKS_HERE, Session, open_cluster
from training.laptop.start_lock import hold_start_lock
from training.plan.data_checks import few_steps
from training.recipe.base import TINY
from training.recipe.recipe import Recipe
from training.recipe.tables import SFT
from training.run.folder import RECIPE
from training.text.counts import NONE, many, plain, size_text

if TYPE_CHECKING:
    from rich.console import Console

KIND = "look"
"""What the folder of a look on the head is called by."""
EXTRA = "pip install -e '.[data]'"


@dataclass(frozen=True)
class Question:
    """What to look at, and how."""

    data: tuple[str, ...]
    model: str
    """As it was typed."""
    recipe: Recipe | None
    """None: what can be seen without a model."""
    show: int = 3
    skip_bad: bool = False
    here: bool = False
    """Nothing is asked of the head."""
    settings: tuple[str, ...] = ()
    """Of `--set`, as they were typed."""

    @property
    def flags(self) -> str:
        """`--data` as it was typed, with a blank before it."""
        return "".join(f" --data {shlex.quote(each)}" for each in self.data)

    @property
    def of_folder(self) -> bool:
        """Whether the model is a folder on this machine."""
        return bool(self.recipe and self.recipe.base_model.folder)


def look(question: Question, now: datetime, tell: Tell) -> Look:
    """The look. Raises DataError, LaunchError, and what an ssh connection raises."""
    if not question.data and (question.recipe is None or question.recipe.base_model != TINY):
        raise DataError(f"say which data: --data FILE: {KINDS_OF_DATA}")
    if question.show < 0:
        raise DataError(f"--show {question.show}: a number of samples, from 0")
    with files_of(question.data, question.recipe.goal if question.recipe else SFT) as training_data:
        return _look(question, training_data, now, tell)


def aside(question: Question) -> str:
    """Which files of the data's folders are not read; empty where all are."""
    source = given(question.data)
    return "" if source is None or isinstance(source, HubDataSet) else ignored_files_note(source)


def next_step(question: Question, look: Look) -> str:
    """What to type now."""
    if not look.usable:
        return "next: fix what is reported above, then look again"
    if question.recipe is None:
        return f"next: what is learned, and lengths in tokens: fab data --model NAME{question.flags}"
    more = [" --skip-bad"] if look.skipped and look.bad else []
    more += [f" --set {shlex.quote(setting)}" for setting in question.settings]
    more += [" --here"] if question.here else []
    more += [" --anyway"] if look.few is not None else []
    elsewhere = "" if question.here else "; with --here on this machine alone"
    return f"next: fab train --model {shlex.quote(question.model)}{question.flags}{''.join(more)} --dry{elsewhere}"


def _look(question: Question, training_data: TrainingData, now: datetime, tell: Tell) -> Look:
    home = data_size.home_of(question.recipe) if question.recipe else None
    lacks = _lacks(question, home)
    data = _data(question, training_data, bool(lacks))
    data = data if data and can_check_here(data) else None
    overview = survey(data, tell) if data else None
    if question.recipe is None and overview is None:
        raise DataError(f"{question.flags.strip()} is looked at on the head: say --model NAME")
    if overview and (question.recipe is None or (overview.refused and (lacks or not overview.readable))):
        return surveyed(overview, question.skip_bad)
    assert question.recipe
    if not lacks and data and overview:
        tokenizer, config = data_size.loaded(home)
        wish = LookWish(question.show, question.skip_bad, tell)
        return look_into(data, overview, question.recipe, tokenizer, config, wish=wish)
    lacks = lacks or ("" if find_spec("pyarrow") else f"reading Parquet needs pyarrow: {EXTRA}")
    instead = LOOKS_HERE if training_data.from_hub and not lacks else ""
    if question.of_folder:
        raise DataError(f"--model {question.model}: a folder is looked at on this machine, but {lacks}")
    if question.here:
        refusal = f"--here: {lacks}; without --here the head is asked"
        if overview is None:
            raise DataError(refusal)
        return replace(surveyed(overview, question.skip_bad), refused=refusal)
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(open_cluster(False, instead))
            stack.enter_context(hold_start_lock(cluster.head))
        except (InventoryError, HeadError) as error:
            if overview is None:
                raise
            refusal = f"{lacks}; the head cannot be asked instead: {error}"
            return replace(surveyed(overview, question.skip_bad), refused=refusal)
        return _on_head(cluster, question, training_data, now, tell)


def _data(question: Question, training_data: TrainingData, leave_to_head: bool) -> Data | None:
    """The files of this machine; None for a data set of the Hub that the head is to download."""
    if training_data.dataset is None:
        return training_data.data
    if leave_to_head or not (question.here or question.of_folder):
        return None
    folder = Path.home() / ".cache" / "spotune" / "cache" / "datasets"
    return downloaded(training_data.dataset, download(training_data.dataset, folder, hub_address(), another_hub()))


def _lacks(question: Question, home: Path | None) -> str:
    """What this machine lacks to tokenise; empty where it has all."""
    if missing := data_size.missing():
        return f"this Python lacks {', '.join(missing)}: {EXTRA}"
    if question.recipe and home is None and question.recipe.base_model != TINY:
        repo = f"{question.recipe.base_model} --revision {question.recipe.revision}"
        fetch = download_command(f"{repo} --include '*.json' --include '*.jinja' --include tokenizer.model", mirror())
        where = "" if mirror() else " from the mirror that HF_ENDPOINT names, or the Hub"
        return f"the tokenizer of {question.recipe.base_model} is not on this machine; {fetch} fetches it{where}"
    return ""


def _on_head(cluster: Session, question: Question, training_data: TrainingData, now: datetime, tell: Tell) -> Look:
    """In a folder like a run's, which is gone afterwards. A run that goes on is not disturbed."""
    assert question.recipe
    with new_run.new_run_folder(cluster.head, KIND, now) as run_id:
        launch = cluster.launch_of(run_id, "training.node.look")
        find_base_model(cluster.head, question.recipe, launch, cluster.models)
        new_run.upload_new_run(cluster.head, launch, {RECIPE: question.recipe.to_toml(), **training_data.shipped})
        arguments = [
            "--run",
            launch.run_dir,
            "--show",
            str(question.show),
            *(["--skip-bad"] if question.skip_bad else []),
        ]
        command = preparing.program_command(launch, launch.module, arguments, from_hub=training_data.from_hub)
        with cluster.head.talk(command) as program:
            for message in program.messages():
                if "look" in message:
                    return look_from(message["look"])
                tell(str(message["doing"]), int(message["records"]))
    raise DataError(f"{question.flags.strip()}: the head looked at them and told nothing")


PLAIN_EVERY_S = 10.0
MOST_FILES = 20
"""Shown by themselves, those with something to mend first."""
BAR = 40
"""Columns of the longest bar."""
LONGEST = 600
"""Characters of one piece of a sample that are shown."""
OPENS, CLOSES = "⟦", "⟧"
"""Around what is learned where there are no colours."""


@contextmanager
def progress() -> Iterator[Tell]:
    """A function to tell how far it is: a line that changes on a terminal, now and then a new one elsewhere."""
    terminal = console(stderr=True)
    if terminal.is_terminal:
        with terminal.status("reading") as status:
            yield lambda what, records: status.update(_doing(what, records))
        return
    last = time.monotonic()

    def tell(what: str, records: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_EVERY_S:
            last = time.monotonic()
            print(_doing(what, records), file=sys.stderr, flush=True)

    yield tell


def _doing(what: str, records: int) -> str:
    """What is done, and how far it is once there is something to count: it begins anew on the head."""
    return f"{what}: {many(records, 'record')}" if records else what


def show(look: Look, terminal: Console | None = None) -> None:
    """All of it, the most urgent last, where the eye is."""
    terminal = terminal or console()
    files = sorted(look.survey.files, key=lambda file: not (file.trouble or file.bad))[:MOST_FILES]
    terminal.print(table(("file", "size", "records", "shape", "bad"), map(_file, files), {"shape"}))
    if more := len(look.survey.files) - len(files):
        terminal.print(f"and {many(more, 'more file')}, {many(look.survey.records, 'record')} in all")
    if look.train:
        terminal.print()
        for line in _learned(look, look.train):
            terminal.print(line, soft_wrap=True)
    if look.lengths:
        terminal.print()
        its = look.lengths
        terminal.print(f"tokens of a sample, before it is cut at max_length {its.max_length}")
        terminal.print(table(("tokens", "samples", "", "cut"), _histogram(its)))
        terminal.print(f"half have at most {its.median}, 95 % at most {its.p95}, the longest {its.longest}")
    coloured = bool(terminal.color_system) and not terminal.no_color
    if look.samples:
        learned = "in green" if coloured else f"between {OPENS} and {CLOSES}"
        terminal.print(f"\nsamples as the model gets them; {learned}: what is learned")
    for sample in look.samples:
        terminal.print()
        terminal.print(_title(sample), soft_wrap=True)
        terminal.print(_text(sample, coloured), soft_wrap=True)
    for title, lines in _lists(look):
        terminal.print(f"\n{title}")
        for line in lines:
            terminal.print(f"  {line}", soft_wrap=True)
    terminal.print()
    for line in remarks(look):
        terminal.print(line, style=None if look.usable else "bold red", soft_wrap=True)


def _file(file: FileSurvey) -> list[str]:
    shapes = ", ".join(f"{shape}" if len(file.shapes) == 1 else f"{n} {shape}" for shape, n in file.shapes.items())
    trouble = "cannot be read" if file.trouble else NONE
    return [file.name, size_text(file.size, 1000), str(file.records), shapes or trouble, str(file.bad)]


def _learned(look: Look, train: DataReport) -> Iterator[str]:
    """What training gets, and in how many steps."""
    share = f"{train.learned_tokens / max(1, train.tokens):.0%}"
    yield (
        f"{look.model}: {many(train.samples, 'sample')} of {many(train.tokens, 'token')}, {train.learned_tokens} "
        f"of them learned ({share}; train_on = {train.settings['train_on']})"
    )
    yield f"{train.batching}: {many(train.rows, 'row')}, {train.efficiency:.1%} full"
    passes = (look.steps or 0) * look.global_batch / max(1, train.rows)
    yield f"{many(look.steps or 0, 'step')} of {many(look.global_batch, 'row')}: each row is seen {plain(passes)} times"
    if few := few_steps(look.steps or 0):
        yield f"{few}; more epochs or steps, or a smaller global_batch, make them more"
    if args := train.settings["template_args"]:
        yield f"template_args: {', '.join(f'{name} = {value}' for name, value in args.items())}"
    if look.validation:
        yield f"held out: {many(look.validation.records, 'record')}, {many(look.validation.tokens, 'token')}"
    if train.end_of_turn:
        yield f"an answer ends with {train.end_of_turn}"


def _histogram(lengths: Lengths) -> Iterator[list[str]]:
    most = max(one.samples for one in lengths.bins)
    for one in lengths.bins:
        yield [
            f"{one.above + 1} to {one.most}",
            str(one.samples),
            "#" * -(-BAR * one.samples // most),
            str(one.cut or ""),
        ]


def _title(sample: ShownSample) -> str:
    number, all_of = sample.of
    which = f", sample {number} of {all_of} (its answers look different once others follow)" if all_of > 1 else ""
    which = f", {sample.side}" if sample.side else which
    cut = f", {sample.cut} cut off" if sample.cut else ""
    part = ", held out" if sample.held_out else ""
    return f"{sample.where}{which}{part}: {sample.learned} of {many(sample.tokens, 'token')} learned{cut}"


def _text(sample: ShownSample, coloured: bool) -> Text:
    """The sample as the model sees it: learned tokens in green, the rest dim, special tokens underlined; in brackets
    what is learned where there are no colours."""
    text = Text()
    within = False
    for piece in sample.pieces:
        if not coloured and piece.learned != within:
            text.append(OPENS if piece.learned else CLOSES)
            within = piece.learned
        style = ("green" if piece.learned else "dim") + (" underline" if piece.special else "")
        text.append(shown(_shortened(piece)), style)
    if within:
        text.append(CLOSES)
    if sample.left_out:
        text.append(f" ({many(sample.left_out, 'more token')})")
    return text


def _shortened(piece: Piece) -> str:
    """The piece without its middle, where it is long."""
    left_out = len(piece.text) - LONGEST
    if left_out <= 0:
        return piece.text
    half = LONGEST // 2
    return f"{piece.text[:half]} ... {left_out} characters ... {piece.text[-half:]}"


def _lists(look: Look) -> Iterator[tuple[str, list[str]]]:
    """What is told record by record, with its title."""
    if look.bad_shown:
        others = [f"and {many(look.bad_more, 'more record')}"] if look.bad_more else []
        yield "bad records", [*look.bad_shown, *others]
    repeats = look.repeats
    if repeats and repeats.shown:
        more = repeats.duplicates - len(repeats.shown)
        lines = [f"{one} is the same as {other}" for one, other in repeats.shown]
        yield "duplicates", [*lines, *([f"and {more} more"] if more else [])]
    if repeats and repeats.leaks_shown:
        more = repeats.leaked + repeats.leaked_question - len(repeats.leaks_shown)
        lines = [f"{one} (held out) asks what {other} asks" for one, other in repeats.leaks_shown]
        yield "leaks", [*lines, *([f"and {more} more"] if more else [])]
