"""The plan on the screen: a table in a terminal, a line a check elsewhere."""

from __future__ import annotations

from inventory.shown import console, table
from training.plan.predict import Plan
from training.plan.situation import Severity

COLOURS: dict[Severity, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}


def show_plan(plan: Plan) -> None:
    """Every check with what was found, and what to do where something is wrong."""
    from rich.text import Text

    terminal = console()
    if not terminal.is_terminal:
        for check in plan.checks:
            print(f"{check.severity:8}{check.sentence}")
        return
    rows = [[Text(each.severity, COLOURS[each.severity]), each.name, each.value, each.cure] for each in plan.checks]
    terminal.print(table(["", "check", "found", "what to do"], rows))
