"""A look at data in a terminal: files, bad records, lengths, what is learned. What comes from a file is text and never
markup. rich is imported where it is used."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inventory.shown import console, shown, table
from training.counting import many, plain, size_text
from training.data.look.content import Look, Rows, remarks
from training.data.look.lengths import Bin, Lengths
from training.data.look.samples import Piece, ShownSample
from training.data.look.survey import FileSurvey, Tell
from training.laptop.figures import NONE
from training.plan.teaches import few_steps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

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


def _learned(look: Look, train: Rows) -> Iterator[str]:
    """What training gets, and in how many steps."""
    share = f"{train.learned_tokens / max(1, train.tokens):.0%}"
    yield (
        f"{look.model}: {many(train.samples, 'sample')} of {many(train.tokens, 'token')}, {train.learned_tokens} "
        f"of them learned ({share}; train_on = {look.train_on})"
    )
    rows = f"{many(train.rows, 'row')}, {train.efficiency:.1%} full"
    alone = f"; a sample a row: {_alone(look, train):.1%}" if look.batching == "packed" else ""
    yield f"{look.batching}: {rows}{alone}"
    passes = (look.steps or 0) * look.global_batch / max(1, train.rows)
    yield f"{many(look.steps or 0, 'step')} of {many(look.global_batch, 'row')}: each row is seen {plain(passes)} times"
    if few := few_steps(look.steps or 0):
        yield f"{few}; more epochs or steps, or a smaller global_batch, make them more"
    if look.template_args:
        yield f"template_args: {', '.join(f'{name} = {value}' for name, value in look.template_args.items())}"
    if look.validation:
        yield f"held out: {many(look.validation.records, 'record')}, {many(look.validation.tokens, 'token')}"
    if look.end_of_turn:
        yield f"an answer ends with {look.end_of_turn}"


def _alone(look: Look, train: Rows) -> float:
    """How full rows would be with a sample each."""
    most = look.lengths.max_length if look.lengths else 1
    return train.tokens / max(1, train.samples * most)


def _histogram(lengths: Lengths) -> Iterator[list[str]]:
    most = max(one.samples for one in lengths.bins)
    for one in lengths.bins:
        yield [f"{one.above + 1} to {one.most}", str(one.samples), _bar(one, most), str(one.cut or "")]


def _bar(one: Bin, most: int) -> str:
    return "#" * -(-BAR * one.samples // most)


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
    from rich.text import Text

    found = Text()
    within = False
    for piece in sample.pieces:
        if not coloured and piece.learned != within:
            found.append(OPENS if piece.learned else CLOSES)
            within = piece.learned
        style = ("green" if piece.learned else "dim") + (" underline" if piece.special else "")
        found.append(shown(_shortened(piece)), style)
    if within:
        found.append(CLOSES)
    if sample.left_out:
        found.append(f" ({many(sample.left_out, 'more token')})")
    return found


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
    found = look.repeats
    if found and found.shown:
        more = found.duplicates - len(found.shown)
        lines = [f"{one} is the same as {other}" for one, other in found.shown]
        yield "duplicates", [*lines, *([f"and {more} more"] if more else [])]
    if found and found.leaks_shown:
        more = found.leaked + found.leaked_question - len(found.leaks_shown)
        lines = [f"{one} (held out) asks what {other} asks" for one, other in found.leaks_shown]
        yield "leaks", [*lines, *([f"and {more} more"] if more else [])]
