"""What lies in the files: shapes, counts, bad records, and the files' own names. Needs no tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from training.data.readers import Raw, raw, together
from training.data.sample import Bad, BadRecord, DataError
from training.data.shapes import recognised
from training.data.source import Data, DataFile
from training.data.workers import in_order, processes_for
from training.text.counts import many

TELL_EVERY = 2000
"""Records between two words about progress."""
MOST_BAD = 10
"""What is wrong with records, and files that cannot be read, told in full."""
Tell = Callable[[str, int], None]
"""Told what is being done, and with how many records so far."""


@dataclass(frozen=True)
class FileSurvey:
    """One file of the data."""

    name: str
    size: int
    """Bytes."""
    shapes: dict[str, int]
    """Good records of each shape."""
    bad: int
    trouble: str = ""
    """Why the file as a whole cannot be read; empty where it can."""
    sha256: str = ""
    """Of its bytes; empty where nobody asked for it."""

    @property
    def records(self) -> int:
        return sum(self.shapes.values())


@dataclass(frozen=True)
class Survey:
    """All of them."""

    files: tuple[FileSurvey, ...]
    bad: int
    bad_shown: tuple[str, ...]
    """What is wrong with the bad records, and where: a sentence for each of the first reasons."""
    bad_more: int = 0
    """Bad for other reasons than those shown."""
    ignored: tuple[str, ...] = ()
    """Keys of records that are not read, the first of them."""

    @property
    def records(self) -> int:
        return sum(file.records for file in self.files)

    @property
    def shapes(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for file in self.files:
            counts.update(file.shapes)
        return counts

    @property
    def readable(self) -> frozenset[str]:
        """The names of the files whose records have the shape that most have, and no other."""
        return frozenset(file.name for file in self._alike)

    @property
    def readable_records(self) -> int:
        """In those files."""
        return sum(file.records for file in self._alike)

    @property
    def _alike(self) -> list[FileSurvey]:
        most = [shape for shape, _ in self.shapes.most_common(1)]
        return [file for file in self.files if list(file.shapes) == most and not file.trouble]

    @property
    def refused(self) -> str:
        """Why data like these cannot be prepared, whatever is left out; empty where they can."""
        trouble = [file.trouble for file in self.files if file.trouble]
        more = len(trouble) - MOST_BAD
        reasons = [*trouble[:MOST_BAD], *([f"and {many(more, 'more file')}"] if more > 0 else [])]
        if len(self.shapes) > 1:
            counts = ", ".join(f"{count} of {shape}" for shape, count in self.shapes.most_common())
            cure = "take the others out, or write them as those (docs/data.md has a record of each shape)"
            reasons.append(f"all records of a run have one shape; these are {counts}: {cure}")
        elif not self.shapes and not reasons:
            bad = f"; {self.bad} {'is' if self.bad == 1 else 'are'} bad" if self.bad else ""
            reasons.append(f"no record can be used{bad}")
        return "\n".join(reasons)


class PieceSurvey(NamedTuple):
    """What some records of a file are."""

    file: DataFile
    shapes: Counter[str]
    bad: list[tuple[str, str]]
    """Where, and why."""
    ignored: set[str]
    trouble: str


def survey(data: Data, tell: Tell) -> Survey:
    """Read every record once."""
    files = data.files
    pieces = ((file, piece) for file in files for piece in together(raw(file)))
    bad, ignored = Bad(skip=True, most=MOST_BAD), set[str]()
    shapes: dict[DataFile, Counter[str]] = {file: Counter() for file in files}
    bad_in, trouble = Counter[DataFile](), dict[DataFile, str]()
    done = told = 0
    for seen in in_order(_seen, pieces, processes_for(files)):
        shapes[seen.file].update(seen.shapes)
        bad_in[seen.file] += len(seen.bad)
        trouble[seen.file] = seen.trouble
        ignored |= seen.ignored
        for where, why in seen.bad:
            bad.add(where, why)
        done += seen.shapes.total() + len(seen.bad)
        if done - told >= TELL_EVERY:
            tell("reading", told := done)
    tell("reading", done)
    surveyed = tuple(
        FileSurvey(file.name, file.path.stat().st_size, dict(shapes[file]), bad_in[file], trouble.get(file, ""))
        for file in files
    )
    return Survey(surveyed, bad.count, tuple(bad.shown), bad.more, tuple(sorted(ignored)[:MOST_BAD]))


def _seen(piece: tuple[DataFile, list[Raw]]) -> PieceSurvey:
    file, raws = piece
    seen = PieceSurvey(file, Counter(), [], set(), "")
    for place, value in raws:
        if isinstance(value, DataError):
            return seen._replace(trouble=str(value))
        try:
            record = recognised(value)
            seen.shapes[record.shape] += 1
            seen.ignored.update(record.ignored)
        except BadRecord as error:
            seen.bad.append((f"{file.name} {place}", str(error)))
    return seen


def quiet(_what: str, _records: int) -> None:
    """A Tell where nobody waits for word of progress."""
