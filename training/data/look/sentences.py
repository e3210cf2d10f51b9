"""What the readers of data say of a record or a file, said again in the language of a page. Pure.

Looks keep these sentences in English, as the terminal tells them; one that is not known here stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, reduce

from training.words import FAULTS, KINDS, PARTS, Say

LONGEST = 2000
"""Characters of a sentence that is said again: what a record has in the place of a role may be of any length."""
_PLACE = r"(?:line|record|row)"
PLACE = re.compile(rf"(?P<file>.*) (?P<what>{_PLACE}) (?P<number>\d+)", re.DOTALL)
PLACES = re.compile(rf"(?P<file>.*) (?P<what>{_PLACE})s (?P<numbers>\d+(?:, \d+)+)", re.DOTALL)
LISTED = re.compile(r"[\w/, ]+")
OF_A_KIND = frozenset({"kind", "one", "other"})
ONE = re.compile(rf"(?P<where>.*? {_PLACE} \d+): (?P<why>.*)", re.DOTALL)


def place(where: str, say: Say) -> str:
    """Where a record stands, as the readers tell it: a file, and the number of what."""
    found = PLACE.fullmatch(where)
    return say(f"{{file}} {found['what']} {{number}}", file=found["file"], number=found["number"]) if found else where


def fault(text: str, say: Say) -> str:
    """What is wrong, without where."""
    for known in FAULTS if len(text) <= LONGEST else ():
        if found := _pattern(known).fullmatch(text):
            return say(known, **{name: _value(name, value, say) for name, value in found.groupdict().items()})
    return text


def bad_record(sentence: str, files: Iterable[str], say: Say) -> str:
    """What is wrong with records, and where they stand. `files`: what the data's files are called in it."""
    if len(sentence) > LONGEST:
        return sentence
    if found := ONE.fullmatch(sentence):
        return f"{place(found['where'], say)}{say(': ')}{fault(found['why'], say)}"
    names = "|".join(re.escape(name) for name in files)
    places = rf"(?P<places>(?:{names}) {_PLACE}s? \d.*?)(?P<more>, \.\.\.)?"
    if found := re.fullmatch(
        rf"(?P<count>\d+) records: (?P<first>the first )?(?P<why>.*) \({places}\)", sentence, re.DOTALL
    ):
        text = "{count} records: the first {why} ({places})" if found["first"] else "{count} records: {why} ({places})"
        where = _places(found["places"], say)
        where = say("{places}, ...", places=where) if found["more"] else where
        return say(text, count=found["count"], why=fault(found["why"], say), places=where)
    return sentence


def _places(text: str, say: Say) -> str:
    if found := PLACES.fullmatch(text):
        numbers = _together(found["numbers"].split(", "), say)
        return say(f"{{file}} {found['what']}s {{numbers}}", file=found["file"], numbers=numbers)
    return _together((place(one, say) for one in text.split(", ")), say)


def _together(words: Iterable[str], say: Say) -> str:
    return reduce(lambda one, other: say("{one}, {other}", one=one, other=other), words)


def _value(name: str, value: str, say: Say) -> str:
    """What stands in the place of a sentence that is called so: a part of a record, a kind, or a list of keys."""
    if value in (KINDS if name in OF_A_KIND else PARTS):
        return say(value)
    return re.sub(r", or | and |(?<=\d) of ", lambda match: say(match[0]), value) if LISTED.fullmatch(value) else value


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """What a sentence of these words looks like when it is filled in."""
    parts = re.split(r"\{(\w+)\}", text)
    return re.compile("".join(f"(?P<{p}>.+?)" if n % 2 else re.escape(p) for n, p in enumerate(parts)), re.DOTALL)
