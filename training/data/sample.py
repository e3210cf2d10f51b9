"""A sample: the tokens of one record, and which of them the model learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from training.errors import TrainingError
from training.exit_codes import UNUSABLE

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
        return sum(label != IGNORED for label in self.labels[1:])
