"""What a probe or a drill came to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["pass", "fail", "not here"]


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    name: str
    state: State
    found: str
    """What was measured; why it failed; why it cannot be shown here."""
    where: str = ""
    """The node or the rank it is about; nothing where it is about all."""


def passed(name: str, detail: str) -> Outcome:
    return Outcome(name, "pass", detail)


def failed(name: str, detail: str) -> Outcome:
    return Outcome(name, "fail", detail)


def not_here(name: str, why: str) -> Outcome:
    return Outcome(name, "not here", why)


def judged(name: str, good: bool, detail: str) -> Outcome:
    """Pass or fail."""
    return Outcome(name, "pass" if good else "fail", detail)


def broke(name: str, error: Exception) -> Outcome:
    """What raised: a driver, a kernel, a library, a machine that went."""
    return failed(name, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")


def tried(name: str, work: Callable[[], Outcome]) -> Outcome:
    """What `work` comes to; that it broke is an outcome of this name, and the others go on."""
    try:
        return work()
    except Exception as error:
        return broke(name, error)


def read(rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Outcomes from the JSON of a node, which is data: what is no outcome raises ValueError."""
    states = {"pass", "fail", "not here"}
    outcomes = []
    for row in rows:
        if row.get("state") not in states or not all(isinstance(row.get(key), str) for key in ("name", "found")):
            raise ValueError(f"no outcome: {row}")
        outcomes.append(Outcome(row["name"], row["state"], row["found"], str(row.get("where", ""))))
    return outcomes


def gathered(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """As a reader wants them: what several ranks say in the same words is one row."""
    where: dict[tuple[str, State, str], list[str]] = {}
    for each in outcomes:
        where.setdefault((each.name, each.state, each.found), []).append(each.where)
    names = {key: places[0] if len(places) == 1 else f"{len(places)} ranks" for key, places in where.items()}
    return [Outcome(*key, place) for key, place in names.items()]


def as_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The same as JSON."""
    return [asdict(outcome) for outcome in outcomes]
