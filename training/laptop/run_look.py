"""What a run shows at one moment, and how that looks in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from inventory.shown import age, length
from inventory.terminal import console
from training.cost.pace import cost_so_far
from training.laptop.on_head.run_folders import LookAnswer
from training.run.folder import ENDED, METRICS, STATUS, Status, begun, is_run_id, parse_metrics, parse_status
from training.text.counts import many, money, size_text
from training.text.files import is_figure

STEP_KEYS = frozenset({"step", "total_steps", "step_s", "loss", "lr", "tokens_per_s", "memory_gib"})
EVALUATION_KEYS = frozenset({"step", "validation_loss"})
"""What is shown of a line of metrics.jsonl."""


@dataclass(frozen=True)
class RunLook:
    """What a run showed at one moment."""

    status: Status | None
    """None until the supervisor has written its first."""
    alive: bool
    """Whether the supervisor runs."""
    metrics: tuple[dict[str, Any], ...]
    """The last steps, oldest first."""
    age_s: float = 0.0
    """Since the status was written, on the head's clock."""
    evaluation: dict[str, Any] | None = None
    """The newest look at the validation data."""
    run_id: str = ""
    fault: str = ""
    """What of its files cannot be read."""

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """`metrics` of its newest start: one that has just resumed has none."""
        if self.status is None:
            return self.metrics
        began = datetime.fromtimestamp(self.status.started, UTC).isoformat(timespec="milliseconds")
        return tuple(row for row in self.metrics if str(row.get("time", began)) >= began)

    @property
    def active(self) -> bool:
        """Whether it is going on: also before the supervisor has written its first status."""
        return self.alive and (self.status is None or not self.status.over)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.state in {*ENDED, "lost"}

    @property
    def cost(self) -> float | None:
        """What the run has cost so far; None where no price is known. One that was lost ended with its last word."""
        if self.status is None:
            return None
        return cost_so_far(self.status, self.status.updated + (self.age_s if self.alive else 0))

    @property
    def values(self) -> dict[str, Any]:
        """For other programs."""
        last = self.metrics[-1] if self.metrics else {}
        return {
            "run": self.run_id,
            "state": self.state,
            "step": last.get("step"),
            "steps": last.get("total_steps"),
            "loss": last.get("loss"),
            "cost": self.cost,
            "currency": self.status.currency if self.status else "",
            "changes": self.status.changes if self.status else 0,
            "lost_steps": self.status.lost_steps if self.status else 0,
            "lost_s": self.status.lost_s if self.status else 0.0,
            "lost_cost": self.status.lost_cost if self.status else None,
            "reason": self.reason,
        }

    @property
    def money(self) -> str:
        """The same with its currency; empty where it is not known."""
        return money(self.cost, self.status.currency) if self.status else ""

    @property
    def state(self) -> str:
        """The status' state; `lost` where it says running and nobody runs it, or cannot be read."""
        if self.status is None:
            return "starting" if self.alive else "lost"
        return self.status.state if self.status.over or self.alive else "lost"

    @property
    def reason(self) -> str:
        """Why it is in this state, and what of its files cannot be read; empty where there is nothing to say."""
        if self.state == "lost" and not self.fault:
            return "its supervisor is gone: the machine restarted, or the process was killed"
        return "; ".join(filter(None, (self.status.reason if self.status else "", self.fault)))


def read_look(answer: LookAnswer) -> RunLook:
    """A look from what a head answered; what of its files cannot be read is its fault, and the rest stands."""
    run_id, now, faults = answer["run"], answer["now"], list[str]()
    status = None
    try:
        status = parse_status(answer["status"]) if answer["status"].strip() else None
        if status and status.run_id != run_id:
            raise ValueError(f"it is of {status.run_id!r}")
    except ValueError as error:
        status = None
        faults.append(f"its {STATUS} cannot be read ({error})")
    metrics, evaluation = answer["metrics"], answer["evaluation"]
    (rows, _, bad), (evaluations, _, _) = parse_metrics(metrics.encode()), parse_metrics(evaluation.encode())
    if bad:
        faults.append(f"{bad} of the last lines of its {METRICS} cannot be read")
    return RunLook(
        status,
        answer["alive"],
        tuple(row for row in rows if _has_numbers(row, STEP_KEYS)),
        now - status.updated if status and is_figure(now) else 0.0,
        next((row for row in reversed(evaluations) if _has_numbers(row, EVALUATION_KEYS)), None),
        run_id,
        "; ".join(faults),
    )


def _has_numbers(row: dict[str, Any], keys: frozenset[str]) -> bool:
    """In place of a loss that is not finite stands null."""
    values = [row.get(key) for key in keys if not ("loss" in key and row.get(key, 0) is None)]
    return all(map(is_figure, values))


def read_looks(answers: Sequence[LookAnswer]) -> list[RunLook]:
    """Of all runs, those that have not begun left out, oldest run first."""
    looks = map(read_look, answers)
    shown = [look for look in looks if is_run_id(look.run_id) and (look.status or look.alive or look.fault)]
    return sorted(shown, key=lambda look: look.status.started if look.status else begun(look.run_id))


def eta_s(metrics: Sequence[dict[str, Any]]) -> float | None:
    """Seconds to the last step, at the mean pace of the steps seen last."""
    if not metrics:
        return None
    last = metrics[-1]
    return mean_step_s(metrics) * (int(last["total_steps"]) - int(last["step"]))


def mean_step_s(metrics: Sequence[dict[str, Any]]) -> float:
    """Seconds a step, of the steps seen last; there is at least one."""
    return float(sum(row["step_s"] for row in metrics) / len(metrics))


def headline(row: dict[str, Any], eta: float | None) -> str:
    """How far a run is, in half a line."""
    clock = str(timedelta(seconds=int(eta or 0)))
    left = "" if eta is None else f"  ETA {clock.removeprefix('0:')}"
    return f"step {row['step']}/{row['total_steps']}  loss {number(row['loss'])}{left}"


def details(row: dict[str, Any], evaluation: dict[str, Any] | None = None, spent: str = "") -> str:
    """The rest of one step in one line, with the newest validation loss there is and what the run has cost so far."""
    validation = ""
    if evaluation is not None:
        validation = f"validation {number(evaluation['validation_loss'])} (step {evaluation['step']})  "
    return (
        f"{validation}lr {row['lr']:.2e}  {row['tokens_per_s']:.0f} tokens/s  {size_text(row['memory_gib'] * 2**30)}"
        f"{spent and f'  {spent}'}"
    )


def number(value: float | None) -> str:
    """A loss; null stands in metrics.jsonl for what is not finite."""
    return "not finite" if value is None else f"{value:.4f}"


PLAIN_EVERY_S = 5.0
SILENT_S = 10.0
"""Without an answer of the head, from which on that is said."""
LONGEST_S = 1e8
"""A run that is said to take longer has a wrong clock."""


@contextmanager
def progress(label: str) -> Iterator[Callable[[RunLook], None]]:
    """A function to give each look to: a bar in a terminal, a line now and then elsewhere."""
    terminal = console()
    if not terminal.is_terminal:
        yield _plain(terminal.print)
        return

    class Bar(Progress):
        heard_at = time.monotonic()

        def get_renderables(self) -> Iterator[Any]:
            yield from super().get_renderables()
            if silence := silent(time.monotonic() - self.heard_at):
                yield Text(silence, style="yellow")
            yield from (Text(task.fields["below"], style="dim") for task in self.tasks if task.fields["below"])

    terminal.print(label, style="bold")
    columns = [BarColumn(20), TextColumn("{task.description}", markup=False)]
    with Bar(*columns, console=terminal) as bar:
        task = bar.add_task("starting", total=None, below="")

        printed: set[str] = set()

        def show(seen: RunLook) -> None:
            bar.heard_at = time.monotonic()
            for each in news(seen):
                if each not in printed:
                    bar.console.print(each)
                    printed.add(each)
            if seen.rows:
                last = seen.rows[-1]
                at, below = headline(last, eta_s(seen.rows)), details(last, seen.evaluation, seen.money)
                at = f"{stopping(seen) or at}{running(seen)}"
                bar.update(task, total=last["total_steps"], completed=last["step"], description=at, below=below)
            elif seen.status:
                bar.update(task, description=stopping(seen) or seen.status.state)

        yield show


def silent(seconds: float) -> str:
    """What is said where the head has not answered for so long; empty where it has of late."""
    return f"no answer from the head for {seconds:.0f} s" if seconds >= SILENT_S else ""


def running(seen: RunLook) -> str:
    """For how long the run, not this terminal, has been there; empty before its first status."""
    took = seen.status.updated + seen.age_s - seen.status.started if seen.status else -1
    return f"  running {timedelta(seconds=round(took))}" if 0 <= took < LONGEST_S else ""


def stopping(seen: RunLook) -> str:
    """What a run says of itself that was asked to stop and is saving; empty of any other."""
    status = seen.status
    return status.reason if status and not status.over and status.cause.kind == "asked" else ""


def news(seen: RunLook) -> list[str]:
    """What a run that goes on says of itself: that it is being stopped, and why; that it is far from its plan."""
    if seen.status is None or seen.status.over:
        return []
    return [each for each in (seen.status.reason, *remarks(seen.status)) if each]


def remarks(status: Status) -> list[str]:
    """What else is to be known of a run; empty texts among them."""
    return [lost(status), off_plan(status)]


def lost(status: Status) -> str:
    """What changes of machines cost a run; empty where there were none."""
    if not status.changes:
        return ""
    took = age(status.lost_s) if status.lost_s < 3600 else length(status.lost_s)
    steps = many(status.lost_steps, "step") if status.lost_steps else ""
    cost = ", ".join(filter(None, (steps, took, money(status.lost_cost, status.currency))))
    return f"{many(status.changes, 'change')} of machines cost {cost}"


def off_plan(status: Status) -> str:
    """How far a run is from its plan; empty where it is near, or has none."""
    planned, took = status.planned_step_s, status.measured_step_s
    if not planned or not took:
        return ""
    many = f"{took / planned:.1f} times" if took > planned else f"{took / planned:.0%} of"
    return f"a step takes {took:.2f} s, {many} the {planned:.2f} s of its plan; later plans go by it"


def _plain(write: Callable[[str], None]) -> Callable[[RunLook], None]:
    printed: dict[str, Any] = {"state": None, "step": None, "at": 0.0, "news": set(), "heard": time.monotonic()}

    def show(seen: RunLook) -> None:
        if silence := silent(time.monotonic() - printed["heard"]):
            write(silence)
        printed["heard"] = time.monotonic()
        if seen.state != printed["state"]:
            write(seen.state)
            printed["state"] = seen.state
        for each in news(seen):
            if each not in printed["news"]:
                write(each)
                printed["news"].add(each)
        row = seen.rows[-1] if seen.rows else None
        last = row is not None and row["step"] == row["total_steps"]
        due = time.monotonic() - printed["at"] > PLAIN_EVERY_S
        if row is not None and row["step"] != printed["step"] and (due or last) and not stopping(seen):
            write(f"{headline(row, eta_s(seen.rows))}{running(seen)}  {details(row, seen.evaluation, seen.money)}")
            printed.update(step=row["step"], at=time.monotonic())

    return show


def ending(run_id: str, seen: RunLook) -> str:
    """How a run ended, in one line."""
    spent = f" ({seen.money} so far)" if seen.money else ""
    why = "; ".join(filter(None, (seen.reason, lost(seen.status) if seen.status else "")))
    return f"{run_id} {seen.state}{spent}{f': {why}' if why else ''}"
