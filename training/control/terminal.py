"""What a run looks like in a terminal: a progress bar, tables. rich is imported where it is used."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from inventory.shown import age, console, table
from training.control import comm_report
from training.control.comm_report import Result
from training.control.follow import Look, describe, eta_s, number

PLAIN_EVERY_S = 5.0


@contextmanager
def progress(label: str) -> Iterator[Callable[[Look], None]]:
    """A function to give each look to: a bar in a terminal, a line now and then elsewhere."""
    terminal = console()
    if not terminal.is_terminal:
        yield _plain(terminal.print)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        TextColumn("{task.fields[words]}", markup=False),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=terminal) as bar:
        task = bar.add_task(label, total=None, words="starting")

        said = ""

        def show(seen: Look) -> None:
            nonlocal said
            if (reason := news(seen)) and reason != said:
                bar.console.print(reason)
                said = reason
            if seen.metrics:
                last = seen.metrics[-1]
                words = describe(last, eta_s(seen.metrics), seen.evaluation, seen.money)
                bar.update(task, total=last["total_steps"], completed=last["step"], words=words)
            elif seen.status:
                bar.update(task, words=seen.status.state)

        yield show


def news(seen: Look) -> str:
    """What a run that goes on says of itself: that it is being stopped, and why."""
    return seen.status.reason if seen.status and not seen.status.over else ""


def _plain(write: Callable[[str], None]) -> Callable[[Look], None]:
    said: dict[str, Any] = {"state": None, "step": None, "at": 0.0, "reason": ""}

    def show(seen: Look) -> None:
        if seen.state != said["state"]:
            write(seen.state)
            said["state"] = seen.state
        if (reason := news(seen)) and reason != said["reason"]:
            write(reason)
            said["reason"] = reason
        row = seen.metrics[-1] if seen.metrics else None
        last = row is not None and row["step"] == row["total_steps"]
        due = time.monotonic() - said["at"] > PLAIN_EVERY_S
        if row is not None and row["step"] != said["step"] and (due or last):
            write(describe(row, eta_s(seen.metrics), seen.evaluation, seen.money))
            said.update(step=row["step"], at=time.monotonic())

    return show


def runs_table(looks: Sequence[Look]) -> None:
    """All runs of a head with state, step, loss, what they cost and age."""
    rows = []
    for seen in looks:
        row = seen.metrics[-1] if seen.metrics else None
        step = f"{row['step']}/{row['total_steps']}" if row else "-"
        loss = number(row["loss"]) if row else "-"
        validation = number(seen.evaluation["validation_loss"]) if seen.evaluation else "-"
        reason = "; ".join(part for part in (seen.status.reason if seen.status else "", seen.fault) if part)
        updated = f"{age(seen.age_s)} ago" if seen.status else "-"
        rows.append([seen.run_id, seen.state, step, loss, validation, seen.money or "-", updated, reason])
    console().print(table(["run", "state", "step", "loss", "validation", "cost", "updated", "reason"], rows))


def check_report(result: Result, previous: Result | None, line_rate_gbps: float | None) -> None:
    """A communication check in tables, then what is wrong and what changed."""
    terminal = console()
    terminal.print(f"{result['backend']}, {result['world_size']} ranks, {result['seconds']:.0f} s")
    for line in comm_report.check_lines(result):
        terminal.print(f"  {line}")
    terminal.print(table(*comm_report.interface_table(result)))
    if result["pairs"]:
        terminal.print(table(*comm_report.pair_table(result)))
    terminal.print(table(*comm_report.sweep_table(result)))
    if slowest := comm_report.slowest_pair(result):
        terminal.print(f"slowest pair: {slowest['from']} -> {slowest['to']}, {slowest['gbit_s']:.2f} Gbit/s")
    for line in comm_report.comparison(result, previous):
        terminal.print(line)
    for line in comm_report.problems(result, line_rate_gbps):
        terminal.print(line, style="yellow")


def print_json(result: Result) -> None:
    """A result for other programs."""
    print(json.dumps(result, indent=1))
