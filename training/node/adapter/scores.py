"""How close an answer is to what it should have been: exact match and ROUGE-L, for any script. No torch."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from training.errors import AdapterError

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f"
_WORDS = re.compile(f"[{_CJK}]|[^\\W_{_CJK}]+")


@dataclass(frozen=True)
class AnswerScores:
    """Means over all answers, each from 0 to 1."""

    exact_match: float
    rouge_l: float


class WordScores:
    """Words for rouge-score: letters and digits of any script, Chinese, Japanese and Korean character by character.

    The library's own tokenizer keeps a-z and 0-9 alone, so that every Chinese answer scores 0.
    """

    def tokenize(self, text: str) -> list[str]:
        """The words of a text, in order."""
        return _WORDS.findall(normalised(text))


def normalised(text: str) -> str:
    """One form of what looks the same: width, case, spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def score(answers: Sequence[str], references: Sequence[str]) -> AnswerScores:
    """Exact match after `normalised`, and the F-measure of ROUGE-L."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise AdapterError(f"ROUGE-L needs the rouge-score library: {error}") from error
    scorer = RougeScorer(["rougeL"], tokenizer=WordScores())
    pairs = list(zip(answers, references, strict=True))
    return AnswerScores(
        fmean(normalised(answer) == normalised(reference) for answer, reference in pairs),
        fmean(scorer.score(reference, answer)["rougeL"].fmeasure for answer, reference in pairs),
    )
