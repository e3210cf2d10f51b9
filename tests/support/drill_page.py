"""docs/faults.md, the fault drill's outcome as tables: `python -m tests.support.drill_page > docs/faults.md`."""

import re
from collections.abc import Iterable

from tests.support.drill import Drill
from tests.support.drill_plan import COMMANDS, KINDS, NOT_APPLICABLE

INTRO = """\
# What goes wrong at the cloud, and what comes of it

Made by `python -m tests.support.drill_page > docs/faults.md`, which plays every one of these faults at every call of
every command, against the [local cloud's API](local-cloud-api.md) with machines on paper: they only pretend to boot,
ssh to them and what a rebuild does over it are pretended too; all else is the real code. `make proof` plays them again
and fails where this page says something else.

After each fault the same command is run again without one. Whatever the fault was, each time:

- there are never more machines than were asked for, and never two of one name;
- every machine, disk and snapshot carries the cluster's tag, so that `fab down` finds it;
- no disk is left unattached and no snapshot begun that the command did not name;
- /data is not left frozen;
- the exit code is 0, or 1 with one sentence, and there is no traceback;
- after the second run a cluster is whole, `fab down` has left nothing, and no call is half done.

| fault | what the cloud does |
|---|---|
| throttle | refuses the call: too many; says when to ask again |
| error-500 | refuses the call with 503 ServiceUnavailable |
| time-out | does nothing, holds the connection, cuts it |
| lost answer | does what was asked, then cuts the connection without an answer |
| no stock | has no machines of the type in the zone |
| price moved | asks half as much again for the type from this call on |
| disk slow | goes on initialising the disks made by this call for a while |
| busy | refuses the call with 400 SystemBusy |
| listed late | leaves what the call makes out of every list for a while |
| not yet known | lists what the call makes, and refuses other calls that name it, NotFound, for a while |
| reclaim, notice | announces just before the call that a machine goes in 5 minutes; the second run is after them |
| reclaim, none | takes a machine back just before the call |
| ... lasts | the same at each call of this action from this one on, until the command has given up |

| outcome | what the command did |
|---|---|
| asked again | waited, made the same call again with the same token, ended well |
| next zone | ordered in the next zone, ended well |
| goes on | was not disturbed, or waited; ended well |
| exit 1 | said what happened and what to do; the same command then ended well |
| - | cannot happen there: no machine runs yet, or the call makes nothing |

`tests/proof/test_drill_kill.py` also ends `fab up` at 20 random points with Ctrl-C or `kill -9`. The next `fab up`
completes the cluster, and the next `fab down` removes it.
"""
HEADERS = {
    "lost-answer": "lost answer",
    "no-stock": "no stock",
    "price-moved": "price moved",
    "disk-initialising": "disk slow",
    "late-list": "listed late",
    "not-yet-known": "not yet known",
    "reclaim, 5 minutes' notice": "reclaim, notice",
    "throttle, lasting": "throttle lasts",
    "error-500, lasting": "error-500 lasts",
    "no-stock, lasting": "no stock lasts",
}


def section(command, calls, cells):
    """The page's part about one command. What is tried is counted: at times nothing is there yet to be taken back."""
    tried = sum(cell.kind.happens_to(cell.call.action) for cell in cells)
    header = ["call", "times", *(HEADERS.get(kind.name, kind.name) for kind in KINDS)]
    rows = [header, ["---"] * len(header), *_rows(calls, cells)]
    lines = [
        f"## {command.name}",
        "",
        f"{command.begins_words}. {len(calls)} calls, {tried} faults tried.",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "What is said where it ends with exit 1:",
        "",
        *(f"- {name}: {sentence}" for name, sentence in sentences(cells)),
    ]
    return "\n".join(lines) + "\n"


def _rows(calls, cells) -> Iterable[list[str]]:
    for action in dict.fromkeys(call.action for call in calls):
        of_action = [cell for cell in cells if cell.call.action == action]
        words = [{cell.word for cell in of_action if cell.kind == kind} for kind in KINDS]
        times = sum(call.action == action for call in calls)
        yield [action, str(times), *(_together(found) for found in words)]


def _together(words):
    happened = sorted(words - {NOT_APPLICABLE}, reverse=True)
    return " or ".join(happened) or NOT_APPLICABLE


def sentences(cells):
    """(fault, sentence) without what differs from call to call and from time to time; each once."""
    found = {(HEADERS.get(c.kind.name, c.kind.name), general(c.sentence)) for c in cells if c.word.startswith("exit")}
    return sorted(found)


def general(sentence):
    """A sentence without ids, addresses and which call or node it is about."""
    for pattern, general_word in (
        (r" \(request [0-9A-F-]+\)", ""),
        (r"^[A-Z][A-Za-z]+: (?=[A-Z])", "CALL: "),
        (r"\b[ids]-bp1\w+", "ID"),
        (r"\bte\d\b", "teN"),
        (r"\d+\.\d+\.\d+\.\d+", "ADDRESS"),
        (r"(costs|no longer) \d+\.\d{2,4}", r"\1 N"),
        (r"\bcn-hangzhou-[hij]\b", "ZONE"),
    ):
        sentence = re.sub(pattern, general_word, sentence)
    return sentence


def page(drill):
    parts = [section(command, drill.calls_of(command), drill.all_cells(command)) for command in COMMANDS]
    return "\n".join([INTRO, *parts])


def part_of(text, command):
    """What a page says about a command."""
    found = re.search(rf"^## {re.escape(command.name)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[0].strip() if found else ""


if __name__ == "__main__":
    with Drill() as ready:
        print(page(ready), end="")
