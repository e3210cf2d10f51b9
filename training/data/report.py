"""What became of data: read wherever a run or a look is told of, so without numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataReport:
    """What became of the data: for the table before launch, the log and the model card."""

    content_hash: str
    shape: str
    records: int
    """Good ones, in this part (training or validation)."""
    bad: int
    """Left out of the whole data, where that was asked for."""
    empty: int
    """Records with nothing left to learn within max_length, left out."""
    truncated: int
    """Samples cut to max_length; pairs with one that is."""
    samples: int
    tokens: int
    learned_tokens: int
    rows: int
    max_length: int
    batching: str
    efficiency: float
    """Tokens over rows times max_length; without packing, what padding every row to max_length would give."""
    longest: int
    """Tokens; of pairs that of a pair in its row."""
    template: bool
    end_of_turn: str | None
    end_of_turn_id: int | None
    end_of_turn_learned: bool
    """Whether any sample teaches the model to stop: its end-of-turn token, or the end of text of plain words."""
    pad_id: int
    eos_id: int | None
    settings: dict[str, Any]
    """The recipe's keys that they were made with."""
    attention_span: float = 0.0
    """0 of data prepared before it was counted, as the counts below."""
    duplicates: int = 0
    """Records of the whole data that are the same as one before."""
    leaked: int = 0
    """Held-out records that stand in the training data as they are."""
    marked: int = 0
    """Records of the whole data with special tokens in their words."""
    marks: tuple[str, ...] = ()
    """The first of these tokens."""
    unknown: int = 0
    """Records that teach the token for what the vocabulary lacks."""
    cut_thoughts: int = 0
    """Records with thoughts that are opened and not ended."""
    only_thoughts: int = 0
    """Records with thoughts that no answer follows."""
    longest_uncut: int = 0
    """Tokens of the longest sample of the whole data, before any was cut."""
    pairs: int = 0
    """Of answers, each two samples that share a row, the chosen one first; 0 where samples stand alone."""
