"""A sample: the tokens of one record and which of them the model learns; and records that cannot be used, counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import countOf

from training.text.counts import many
from training.text.problems import UNUSABLE, TrainingError

IGNORED = -100
"""Label of a token that is read but not learned; torch's cross-entropy skips it."""


class DataError(TrainingError, ValueError):
    """The data cannot be trained on; the message says the file, the line and what is wrong there."""

    exit_code = UNUSABLE


class NothingLeftError(DataError):
    """None of the records is for a part, or has anything to learn; of others it might be."""


class BadRecord(ValueError):
    """What is wrong with one record, before the file and the line are known."""


@dataclass(frozen=True)
class Sample:
    """One tokenised record; `labels` are the ids where the model learns, IGNORED elsewhere, unshifted."""

    ids: Sequence[int]
    labels: Sequence[int]

    @property
    def learned(self) -> int:
        """Tokens that count in the loss: each is predicted from the one before, so the first never does."""
        predicted = self.labels[1:]
        return len(predicted) - countOf(predicted, IGNORED)


SHOWN = 3
"""Reasons told in full, and places of each; of the others the number."""
CURE = "fix them, or skip them with --skip-bad"
"""Of bad records among good ones."""


@dataclass
class Reason:
    """What is wrong with records, in the first one's words; the others' differ in their numbers at most."""

    words: str
    places: list[str] = field(default_factory=list)
    """Of the first of them: file and line."""
    count: int = 0
    alike: bool = True
    """Whether all say it in the same words."""

    @property
    def sentence(self) -> str:
        if self.count == 1:
            return f"{self.places[0]}: {self.words}"
        first, more = "" if self.alike else "the first ", ", ..." if self.count > len(self.places) else ""
        return f"{many(self.count, 'record')}: {first}{self.words} ({_together(self.places)}{more})"


@dataclass
class Bad:
    """The records that cannot be used, and why the first of them cannot."""

    skip: bool
    most: int = SHOWN
    """So many reasons are told in full."""
    cure: str = ""
    """What whoever reads of them can do where there are good ones too."""
    count: int = 0
    _reasons: dict[str, Reason] = field(default_factory=dict)

    def add(self, where: str, why: str) -> None:
        """One more. `where`: file and place, as "a.jsonl line 3"."""
        self.count += 1
        kind = re.sub(r"\d+", "0", why)
        if kind not in self._reasons and len(self._reasons) >= self.most:
            return
        reason = self._reasons.setdefault(kind, Reason(why))
        reason.count += 1
        reason.alike &= why == reason.words
        if len(reason.places) < SHOWN:
            reason.places.append(where)

    @property
    def shown(self) -> list[str]:
        """A sentence for each of the first reasons."""
        return [reason.sentence for reason in self._reasons.values()]

    @property
    def more(self) -> int:
        """How many are bad for other reasons than those shown."""
        return self.count - sum(reason.count for reason in self._reasons.values())

    @property
    def left_out(self) -> str:
        """How many, where they were to be skipped; empty where none was."""
        return f"{many(self.count, 'bad record')} left out" if self.count and self.skip else ""

    def refuse(self, good: int = 0) -> None:
        """DataError with the first of them, unless they were to be skipped. `good`: how many can be used."""
        if self.count and not self.skip:
            lines = [*self.shown, *([f"and {many(self.more, 'more bad record')}"] if self.more else [])]
            cure = self.cure if good else "there are no others; fix them"
            raise DataError("\n".join([*lines, *([f"{many(self.count, 'bad record')}: {cure}"] if self.cure else [])]))


def _together(places: list[str]) -> str:
    """Places of one file as "a.jsonl lines 3, 9"."""
    ahead = {place.rpartition(" ")[0] for place in places}
    if len(places) == 1 or len(ahead) > 1:
        return ", ".join(places)
    return f"{ahead.pop()}s {', '.join(place.rpartition(' ')[2] for place in places)}"
