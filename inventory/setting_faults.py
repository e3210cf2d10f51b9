"""What is wrong in cluster.toml, in sentences. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from training.key_names import near
from training.value_words import expected

MOVED = {"local.nodes": "aliyun.nodes", "local.disk_gib": "aliyun.data_disk_gib"}
"""Keys that a cluster.toml may still have, and where they stand now."""
UNKNOWN = "extra_forbidden"
WORDS = {
    UNKNOWN: "unknown key",
    "missing": "missing",
    "model_type": "must be a table",
    "tuple_type": "must be a list",
}


FULL_WIDTH = dict(zip("“”„‘’，：＝［］＃【】", '"""\'\',:=[]#[]', strict=True))
"""What an input method writes for signs of TOML."""
QUOTED = re.compile(r""" "(\\.|[^"])*" | '[^']*' | \#.* """, re.VERBOSE)
"""Of a line, in which these signs may be."""


def of_another_width(text: str) -> str:
    """Where a file has signs that only look like TOML's; empty where it has none."""
    for number, line in enumerate(text.splitlines(), start=1):
        if sign := next((sign for sign in QUOTED.sub("", line) if sign in FULL_WIDTH), ""):
            return f"; line {number} has the sign {sign}, which is none of TOML's: write {FULL_WIDTH[sign]}"
    return ""


def of_an_open_quote(text: str) -> str:
    """Which line has a quote that nothing closes; empty where none has."""
    if '"""' in text or "'''" in text:
        return ""
    for number, line in enumerate(text.splitlines(), start=1):
        if any(line.count(quote) % 2 for quote in "\"'") and not _is_toml(line):
            return f"; in line {number} a quote is opened and not closed"
    return ""


def _is_toml(line: str) -> bool:
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    return True


def sentences(error: ValidationError, known: Sequence[str]) -> Iterator[str]:
    """Every problem of a file with its key. `known`: all keys there are, dotted."""
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == UNKNOWN:
            yield f"{key}: {WORDS[UNKNOWN]}{_meant(key, problem['loc'], known)}"
        elif problem["type"] in WORDS:
            yield f"{key}: {WORDS[problem['type']]}"
        else:
            yield f"{key}: {expected(problem)}, not {problem['input']!r}"


def _meant(key: str, place: Sequence[int | str], known: Sequence[str]) -> str:
    if key in MOVED:
        return f"; it is {MOVED[key]}"
    meant = near(".".join(part for part in place if isinstance(part, str)), known)
    return f"; did you mean {meant}?" if meant else ""
