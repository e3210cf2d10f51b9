"""`fab status`, and what plans, runs and checks look like in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from inventory.cloud.values import Instance
from inventory.renting.report import show_machines
from inventory.settings import load_settings
from inventory.shown import age, length
from inventory.terminal import console, table
from training.laptop import runs
from training.laptop.follow import RunLook, details, eta_s, headline, number
from training.laptop.new_run import disk_record, under_notice, who_goes
from training.laptop.open_cluster import Session
from training.plan.fits import Severity
from training.plan.predict import Plan
from training.run import comm_report, notices
from training.run.comm_report import Result
from training.run.folder import Status
from training.text.counts import many
from training.text.files import figure_in

BOOTED = "ps -o etimes= -p 1"
"""The first process's age: a host of the local cloud has the kernel, and so the uptime, of the machine it is on."""


def show_rented() -> tuple[Instance, ...]:
    """Rented machines before anything is asked of them: one that is being reclaimed may not answer."""
    settings = load_settings()
    return show_machines(settings) if settings.is_rented else ()


def values(cluster: Session, rented: Sequence[Instance]) -> dict[str, Any]:
    """Whether every node answers, when which machine is released, all runs, the newest first: for other programs."""
    answers = cluster.ask_all(BOOTED) if cluster.nodes else {}
    ends = {each.instance_id: each.release_at.isoformat() for each in rented if each.release_at}
    nodes = [
        {
            "node": each.name,
            "address": each.address,
            "up_s": figure_in(str(answers[each.name])) or None,
            "error": str(answers[each.name]) if isinstance(answers[each.name], Exception) else "",
            "released_at": ends.get(each.machine_id),
        }
        for each in cluster.nodes
    ]
    return {"nodes": nodes, "runs": [seen.values for seen in runs.all_runs(cluster.head)[::-1]]}


def show(cluster: Session) -> None:
    """Whether every node answers, whose data disk the head has, all runs with their state, the newest first."""
    head = cluster.head
    if cluster.nodes:
        answers = cluster.ask_all(BOOTED)
        rows = [[n.name, n.address, since(str(answers[n.name]))] for n in cluster.nodes]
        console().print(table(["node", "address", "state"], rows, {"state"}))
        if soon := under_notice(cluster):
            print(f"{who_goes(soon)}; when it is gone: {notices.ALL_AGAIN}")
        print(f"the head is {cluster.nodes[0].name}, {cluster.nodes[0].address}: fab ssh")
        if record := disk_record(head):
            print(f"/data on {head.name}: of the cluster {record.cluster}, generation {record.generation}")
    runs_table(runs.all_runs(head)[::-1])


def since(answer: str) -> str:
    """How long a node is up, by what it answers; an error as it is."""
    return f"up {length(seconds)}" if (seconds := figure_in(answer)) else answer


PLAIN_EVERY_S = 5.0
SILENT_S = 10.0
"""Without an answer of the head, from which on that is said."""
LONGEST_S = 1e8
"""A run that is said to take longer has a wrong clock."""
ALWAYS_SHOWN = ("records", "time")
"""What one wants to know of a start although nothing is wrong with it."""
COLOURS: dict[Severity, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}


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
    return [each for each in (seen.status.reason, off_plan(seen.status)) if each]


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


def runs_table(looks: Sequence[RunLook]) -> None:
    """All runs of a head with state, step, loss, what they cost and age."""
    rows = []
    for seen in looks:
        row = seen.metrics[-1] if seen.metrics else None
        step = f"{row['step']}/{row['total_steps']}" if row else "-"
        loss = number(row["loss"]) if row else "-"
        validation = number(seen.evaluation["validation_loss"]) if seen.evaluation else "-"
        reason = "; ".join(filter(None, (seen.reason, off_plan(seen.status) if seen.status else "")))
        updated = f"{age(seen.age_s)} ago" if seen.status else "-"
        rows.append([seen.run_id, seen.state, step, loss, validation, seen.money or "-", updated, reason])
    if not rows:
        print("there are no runs")
        return
    console().print(
        table(["run", "state", "step", "loss", "validation", "cost", "updated", "reason"], rows, {"reason"})
    )


def show_plan(plan: Plan, every_check: bool) -> None:
    """What the checks found, and what to do where something is wrong; those that passed are counted, unless
    `every_check` is to be shown."""
    terminal = console()
    listed = [check for check in plan.checks if every_check or check.severity != "ok" or check.name in ALWAYS_SHOWN]
    if terminal.is_terminal:
        rows = [[Text(each.severity, COLOURS[each.severity]), each.name, each.value, each.cure] for each in listed]
        terminal.print(table(["", "check", "found", "what to do"], rows, {"found", "what to do"}))
    else:
        for check in listed:
            print(f"{check.severity:8}{check.sentence}")
    if passed := len(plan.checks) - len(listed):
        print(f"{many(passed, 'more check')} passed; --dry shows all of them")


def check_report(result: Result, previous: Result | None, line_rate_gbps: float | None) -> None:
    """A communication check in tables, then what is wrong and what changed."""
    terminal = console()
    terminal.print(f"{result['backend']}, {many(result['world_size'], 'rank')}, {result['seconds']:.0f} s")
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
