"""What was measured of a cluster, for its plans: what lies on its head, where that answers, and what was fetched from
it. Of other clusters' runs those on the same cards count too."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace

from inventory.nodes import Node
from training.laptop.head_node import Head, HeadError, RemoteHead
from training.laptop.on_head import fs
from training.laptop.runs import CHECK
from training.plan import calibration
from training.plan.calibration import Calibration, MeasuredRun
from training.run import comm_report
from training.run.comm_report import Result
from training.run.folder import LOCAL_RUNS, MEASURED, PROVE, RESULT
from training.text.files import within

HEAD_S = 4.0
"""What `fab plan` waits for a head at most."""
NEWEST = 40


@dataclass(frozen=True)
class Measurements:
    """All of it."""

    calibration: Calibration | None = None
    """The newest of this cluster."""
    runs: tuple[MeasuredRun, ...] = ()
    checks: tuple[Result, ...] = ()
    """Communication checks that nobody fetched yet."""
    notes: tuple[str, ...] = ()
    """What could not be asked, for people."""

    def and_also(self, other: Measurements) -> Measurements:
        """The newer calibration, and the runs of both."""
        made = [each.calibration for each in (self, other) if each.calibration]
        runs = {each.run_id: each for each in (*self.runs, *other.runs)}
        newest = max(made, key=lambda each: each.time, default=None)
        return Measurements(newest, tuple(runs.values()), self.checks + other.checks, self.notes + other.notes)


def fetched(cluster: str) -> Measurements:
    """What lies on this machine; a file that cannot be read is said and left out."""
    calibrations = []
    for path in sorted(LOCAL_RUNS.glob(f"{PROVE}-*/{calibration.FILE}")):
        try:
            calibrations.append(calibration.parse_calibration(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            print(f"{path} is left out: {error}", file=sys.stderr)
    made = max((each for each in calibrations if each.cluster == cluster), key=lambda each: each.time, default=None)
    paths = sorted(LOCAL_RUNS.glob(f"*/{MEASURED}"), key=lambda path: path.stat().st_mtime)[-NEWEST:]
    runs = _runs((str(path), path.read_text(encoding="utf-8", errors="replace")) for path in paths)
    return Measurements(made, tuple(runs))


def of_head(head: Head) -> Measurements:
    """What lies on a head. Raises HeadError where it does not answer."""
    path = calibration.calibration_file(head.runs)
    made = _calibration(head.name, path, head.ask(fs.text, path) or "")
    checks = tuple(_checks(head.name, head.ask(fs.newest_texts, head.runs, f"{CHECK}-*/{RESULT}", 1)))
    measured = head.ask(fs.newest_texts, head.runs, f"*/{MEASURED}", NEWEST)
    return Measurements(made, tuple(_runs((head.name, each) for each in measured)), checks)


def known(cluster: str, node: Node | None) -> Measurements:
    """Of a cluster; `node`: its head, where it stands. One that does not answer in time is left out, with a note."""
    here = fetched(cluster)
    if node is None:
        return here
    try:
        with closing(RemoteHead(node)) as head:
            return here.and_also(within(HEAD_S, lambda: of_head(head)))
    except (HeadError, TimeoutError) as error:
        return replace(here, notes=(f"what {node.name} has measured is not known: {error}",))


def _calibration(name: str, path: str, content: str) -> Calibration | None:
    try:
        return calibration.parse_calibration(content) if content.strip() else None
    except ValueError as error:
        print(f"{name}: {path} is left out: {error}", file=sys.stderr)
        return None


def _checks(name: str, contents: Iterable[str]) -> Iterable[Result]:
    for content in contents:
        try:
            yield comm_report.parse_result(content)
        except ValueError as error:
            print(f"{name}: a check's {RESULT} is left out: {error}", file=sys.stderr)


def _runs(contents: Iterable[tuple[str, str]]) -> Iterable[MeasuredRun]:
    for where, content in contents:
        try:
            yield calibration.parse_measured(content)
        except ValueError as error:
            print(f"{where}: a run's {MEASURED} is left out: {error}", file=sys.stderr)
