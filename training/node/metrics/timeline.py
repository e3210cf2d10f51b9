"""The starts of a run in its report: which machines took part when, why they changed, and what that took. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.node.metrics.run_tables import duration, moment
from training.run.history import Loss, RunStart
from training.text.catalogue import Say
from training.text.counts import bare


@dataclass(frozen=True)
class Lane:
    """A machine's line."""

    name: str
    spans: tuple[tuple[float, float], ...]
    """Where each start that it took part in begins, and how wide it is: in per cent of all starts together."""


def lanes(starts: Sequence[RunStart], until: float) -> list[Lane]:
    """One line a machine, in the order in which they came. What lies between two starts that people made is left out,
    and so are starts of which nobody knows how long they took."""
    lengths = [max(0.0, end - start.at) if end else 0.0 for start, end in _ends(starts, until)]
    whole = sum(lengths) or 1.0
    spans: dict[str, list[tuple[float, float]]] = {}
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        left = 100 * sum(lengths[:number]) / whole
        for name in start.hosts if length else ():
            spans.setdefault(name, []).append((round(left, 3), round(100 * length / whole, 3)))
    return [Lane(name, tuple(each)) for name, each in spans.items()]


def start_rows(starts: Sequence[RunStart], until: float, currency: str, say: Say) -> list[tuple[str, ...]]:
    """Number, machines, began, took, why the machines changed, what that took."""
    return [
        (
            str(number),
            ", ".join(start.hosts),
            moment(start.at, say),
            duration(end - start.at if end else None, say),
            start.why,
            _lost(start.loss, currency, say) if start.loss else "",
        )
        for number, (start, end) in enumerate(_ends(starts, until), 1)
    ]


def _ends(starts: Sequence[RunStart], until: float) -> Iterator[tuple[RunStart, float | None]]:
    """Each start with its end; the last one goes on where none is noted."""
    for start in starts:
        yield start, start.ended or (until if start is starts[-1] else None)


def _lost(loss: Loss, currency: str, say: Say) -> str:
    steps = f"{say('steps')}{say(': ')}{loss.steps}" if loss.steps else ""
    return say(", ").join(filter(None, (steps, duration(loss.seconds, say), bare(loss.cost, currency))))
