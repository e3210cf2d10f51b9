"""The doctor's findings for people: a table of checks, then what is wrong and what mends it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from deploy.doctor import Finding
from inventory.shown import table

COLOURS = {"fine": "green", "warning": "yellow", "broken": "red"}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """One row a check where all is well, one a node where it is not; every mending command once below.

    The console is one of `inventory.shown`: what nodes say is no markup.
    """
    rows = [
        (check, nodes, Text(level, COLOURS[level]), message)
        for check, group in groupby(findings, key=lambda finding: finding.check)
        for nodes, level, message in _rows(list(group))
    ]
    console.print(table(("check", "node", "state", "what"), rows, {"node", "what"}))
    mends: dict[str, list[str]] = {}
    for finding in findings:
        if finding.mend and finding.node not in mends.setdefault(finding.mend, []):
            mends[finding.mend].append(finding.node)
    if mends:
        console.print("\nTo mend it:")
    for command, nodes in mends.items():
        console.print(f"  {', '.join(nodes)}: {command}", soft_wrap=True)


def _rows(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """(nodes, level, message): equal answers share a row, and so does whatever is fine."""
    fine = [finding for finding in findings if finding.level == "fine"]
    rows: list[tuple[str, str, str]] = []
    for level, message in dict.fromkeys((f.level, f.message) for f in findings if f.level != "fine"):
        nodes = [f.node for f in findings if (f.level, f.message) == (level, message)]
        rows.append((", ".join(nodes), level, message))
    if fine:
        who = f"all {len(fine)}" if len(fine) == len(findings) > 1 else ", ".join(f.node for f in fine)
        same = len({f.message for f in fine}) == 1
        rows.append((who, "fine", fine[0].message if same else f"{fine[0].node}: {fine[0].message}"))
    return rows
