"""Texts for `tiny` that are the same under every Python, where its own are the docstrings of the one that runs it."""

from __future__ import annotations

import random

VERBS = ("Return", "Read", "Write", "Open", "Close", "Split", "Join", "Count", "Sort", "Find", "Copy", "Check", "Parse")
KINDS = ("first", "last", "empty", "sorted", "binary", "quoted", "nested", "local", "shared", "default", "pending")
THINGS = (
    "line",
    "file",
    "header",
    "record",
    "folder",
    "message",
    "number",
    "path",
    "field",
    "key",
    "process",
    "socket",
)
WHERE = ("of a {}", "in each {}", "from every {}", "behind the {}", "without its {}", "for one {} after another")
MORE = (
    "Raise an error where the {} is not there.",
    "The {} is left as it was.",
    "Where there is no {}, nothing is done.",
    "A second call with the same {} gives the same.",
    "It may be called while another {} is open.",
)
NAMES = ("archive", "buffer", "calendar", "dialect", "encoder", "finder", "gateway", "handler", "index", "journal")


def fixed_docstrings():
    """As tiny.docstrings: (dotted name, docstring)."""
    dice = random.Random(0)
    made = []
    for number in range(1200):
        module, verb, thing = NAMES[number * len(NAMES) // 1200], dice.choice(VERBS), dice.choice(THINGS)
        place = dice.choice(WHERE).format(dice.choice(THINGS))
        first = f"{verb} the {dice.choice(KINDS)} {thing} {place}."
        rest = " ".join(line.format(dice.choice(THINGS)) for line in dice.sample(MORE, dice.randrange(4)))
        made.append((f"{module}.{verb.lower()}_{thing}_{number}", f"{first}\n\n{rest}".strip()))
    return tuple(made)
