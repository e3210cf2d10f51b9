"""Before a run starts: data prepared on the head, what was measured of its machines, and the check that they talk."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from inventory.node_program import ProgramError, ProgramRefused
from inventory.nodes import Node
from inventory.shown import print_json
from inventory.terminal import console, table
from training.cost.pace import LINE_SHARE
from training.cost.pipeline import stages_of
from training.data.hub import POINTER
from training.data.sample import DataError
from training.laptop import fetch, follow, new_run
from training.laptop.base_model import hub_address
from training.laptop.head_node import Head, HeadError, RemoteHead
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session
from training.laptop.runs import CHECK
from training.plan import calibration
from training.plan.calibration import Calibration, MeasuredRun, Ranks
from training.plan.facts import Known, NodeHardware, rank_cards
from training.plan.layout import between, in_a_row
from training.recipe.recipe import Recipe
from training.run import comm_report
from training.run.comm_report import Result, parse_result
from training.run.events import RUN_VARIABLE
from training.run.folder import LOCAL_RUNS, MEASURED, PROVE, RESULT
from training.run.launch import Launch
from training.text.counts import many, plain
from training.text.files import bounded_json, within

T = TypeVar("T")
PREPARE_S = 3 * 3600.0
"""Tokenising takes about a minute for 100 MB; what is larger was not meant for an evening."""
ONE_MACHINE = 20e9
"""Bytes a second between two ranks of one machine: what GPUs do over PCIe 4."""
ASSUMED = "an assumption for ranks of one machine"


@dataclass(frozen=True)
class DataRequest:
    """What to prepare differently from usual."""

    skip_bad: bool = False
    from_hub: bool = False
    """The data are downloaded on the head."""


def prepare(head: Head, launch: Launch, order: DataRequest) -> dict[str, Any]:
    """Make the prepared data in the run folder; gives the report. DataError for data that cannot be used.

    Whoever stops waiting, by Ctrl-C or by going away, ends it.
    """
    arguments = ["--run", launch.run_dir, "--attached", *(["--skip-bad"] if order.skip_bad else [])]
    with head.talk(program_command(launch, "training.node.prepare", arguments, from_hub=order.from_hub)) as program:
        try:
            return within(PREPARE_S, program.answer)
        except ProgramRefused as error:
            raise DataError(str(error)) from error
        except ProgramError as error:
            raise HeadError(f"preparing the data: {error}") from error
        except TimeoutError as error:
            raise HeadError(f"preparing the data on {head.name}: {error}") from error


def order_of(head: Head, run_dir: str) -> DataRequest:
    """What a run's data were prepared with."""
    report = head.ask(fs.text, path := f"{run_dir}/data/report.json")
    if report is None:
        raise HeadError(f"{head.name} has no {path}")
    from_hub = head.ask(fs.exists, f"{run_dir}/data/train{POINTER}")
    return DataRequest(skip_bad=bounded_json(report)["report"]["bad"] > 0, from_hub=from_hub)


def program_command(launch: Launch, module: str, arguments: Sequence[str], *, from_hub: bool) -> str:
    """A shell command that runs one of our programs in a run's folder, as its ranks will run; where it fails it prints
    why. `from_hub`: it downloads data."""
    run = shlex.quote(launch.run_dir)
    # without the run's mark, which is for what a stop of the run should end
    env = {key: value for key, value in launch.env.items() if key != RUN_VARIABLE}
    if from_hub:
        env.pop("HF_HUB_OFFLINE", None)
        env |= {"HF_ENDPOINT": address} if (address := hub_address()) else {}
    settings = [f"{key}={value}" for key, value in env.items()]
    argv = ["env", *settings, launch.python, "-m", module, *arguments]
    words = f"{run}/logs/prepare.log"
    return f"cd {run} && {{ {shlex.join(argv)} 2>{words} || {{ c=$?; cat {words}; exit $c; }}; }}"


def measured_speeds(cluster: Session, launch: Launch, nodes: Sequence[NodeHardware]) -> Known:
    """How fast these nodes are."""
    measured = fetched_measurements("").and_also(heads_measurements(cluster.head))  # no calibration but the head's own
    whose, rate = ranks_of(cluster, launch, nodes), cluster.line_rate_gbps
    link = link_speed(whose, len(launch.hosts), rate, measured.calibration, checks=measured.checks)
    return replace(link, runs=measured.runs)


def ranks_of(cluster: Session, launch: Launch, nodes: Sequence[NodeHardware]) -> Ranks:
    """Those of a launch, to look up what was measured of them."""
    names = frozenset(host.name for host in launch.hosts) if cluster.settings else frozenset()
    cards = dict.fromkeys(card.name for card in rank_cards(nodes))
    return Ranks(cluster.name, launch.world_size, tuple(cards), names)


def link_speed(
    whose: Ranks | None,
    nodes: int,
    line_rate_gbps: float | None,
    made: Calibration | None,
    *,
    checks: Sequence[Result] = (),
) -> Known:
    """How fast two ranks talk as they were measured last, else as the network promises; and what else was measured of
    them. `whose`: None for ranks that are not there yet. `checks`: communication checks besides those that were
    fetched."""
    mine = _checks_of(whose, checks) if whose else []
    measured = [(float(r["time"]), comm_report.best_busbw(r, "all_gather") * 1e9, r["run_id"]) for r in mine]
    if made and whose and (proved := made.link(whose)):
        measured.append((made.time, proved, made.run_id))
    if measured and (newest := max(measured))[1]:
        return Known(newest[1], newest[2], made)
    if nodes == 1:
        return Known(ONE_MACHINE, ASSUMED, made)
    if line_rate_gbps is None:
        return Known(None, "", made)
    return Known(LINE_SHARE * line_rate_gbps / 8 * 1e9, "its promised line rate", made)


def in_stage_order(cluster: Session, launch: Launch, recipe: Recipe, nodes: Sequence[NodeHardware]) -> Launch:
    """The launch with its nodes in the order in which the stages of a pipeline talk fastest, by what `fab check`
    measured last between each two of them; the head stays the first. Nodes of different cards stay as they stand: the
    layers were shared out by that."""
    slots = {host.slots for host in launch.hosts}
    if not recipe.is_pipeline or len(slots) != 1 or len(set(rank_cards(nodes))) > 1:
        return launch
    checks = _checks_of(ranks_of(cluster, launch, nodes), heads_measurements(cluster.head).checks)
    newest = max(checks, key=lambda result: float(result["time"]), default=None)
    if newest is None:
        return launch
    gbit_s = {(pair["from"], pair["to"]): float(pair["gbit_s"]) for pair in newest["pairs"]}
    by_name, shape = {host.name: host for host in launch.hosts}, (slots.pop(), stages_of(recipe, launch.world_size))
    now, best = tuple(by_name), in_a_row(tuple(by_name), gbit_s, *shape)
    if best == now:
        return launch
    slowest = [min(between(order, gbit_s, *shape)) for order in (best, now)]
    print(
        f"stages on {', '.join(best)} in this order: the slowest link between two has {plain(slowest[0])} Gbit/s, "
        f"{plain(slowest[1])} as the nodes are listed ({newest['run_id']})"
    )
    return replace(launch, hosts=tuple(by_name[name] for name in best))


def _checks_of(whose: Ranks, more: Sequence[Result] = ()) -> list[Result]:
    """What `fab check` measured of these ranks, as it was fetched, and `more` of it."""
    return [each for each in (*fetched_results(LOCAL_RUNS)[0], *more) if _are_of(each, whose)]


def _are_of(result: Result, whose: Ranks) -> bool:
    """Whether a check was of these ranks; it says no kind of card, but whether there were any."""
    same = (result.get("cluster"), result["world_size"]) == (whose.cluster, whose.count)
    on_cards = result["backend"] == "nccl"
    return same and on_cards == bool(whose.cards) and whose.are_on(comm_report.node_names(result))


def check(cluster: Session, now: datetime, line_rate_gbps: float, as_json: bool) -> None:
    """Run it, bring its result home and show it; Ctrl-C leaves it to go on. Raises RunFailed for wrong results."""
    run_id = start_check(cluster, now)
    seen = follow.follow_run(cluster.head, run_id)
    if seen is None:
        return
    follow.print_outcome(cluster.head, run_id, seen)
    fetch.collect_results(cluster.head, run_id)
    results, unreadable = fetched_results(LOCAL_RUNS)
    for phrase in unreadable:
        print(phrase, file=sys.stderr)
    if run_id not in {result["run_id"] for result in results}:
        raise follow.RunFailed(f"{run_id} left no result that can be read")
    result, previous = comm_report.this_and_previous(results, run_id)
    if as_json:
        print_json(result)
    else:
        check_report(result, previous, line_rate_gbps or cluster.line_rate_gbps)
    if comm_report.wrong_results(result):
        raise follow.RunFailed("the collectives compute wrong results; do not train on these nodes")


def start_check(cluster: Session, now: datetime) -> str:
    """Start a communication check; gives its run id."""
    return new_run.start_ranks(cluster, CHECK, now, "training.node.commcheck").run_id


def fetched_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Every communication check fetched so far, and one phrase for each that cannot be read."""
    results, unreadable = [], []
    for path in sorted(folder.glob(f"{CHECK}-*/result.json")):
        try:
            results.append(parse_result(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            unreadable.append(f"{path} cannot be read and is left out ({error})")
    return results, unreadable


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


HEAD_S = 4.0
"""What `fab plan` waits for a head at most."""
NEWEST = 40


@dataclass(frozen=True)
class Measurements:
    """What was measured of a cluster: what lies on its head, where that answers, and what was fetched from it. Of other
    clusters' runs those on the same cards count too."""

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


def fetched_measurements(cluster: str) -> Measurements:
    """What lies on this machine; a file that cannot be read is said and left out."""
    proved = _texts(sorted(LOCAL_RUNS.glob(f"{PROVE}-*/{calibration.FILE}")))
    made = [each for each in _readable(calibration.parse_calibration, proved) if each.cluster == cluster]
    paths = sorted(LOCAL_RUNS.glob(f"*/{MEASURED}"), key=lambda path: path.stat().st_mtime)[-NEWEST:]
    runs = _readable(calibration.parse_measured, _texts(paths))
    return Measurements(max(made, key=lambda each: each.time, default=None), tuple(runs))


def heads_measurements(head: Head) -> Measurements:
    """What lies on a head. Raises HeadError where it does not answer."""
    path = calibration.calibration_file(head.runs)
    proved = head.ask(fs.text, path) or ""
    made = _readable(calibration.parse_calibration, [(f"{head.name}: {path}", proved)] if proved.strip() else [])
    checks = head.ask(fs.newest_texts, head.runs, f"{CHECK}-*/{RESULT}", 1)
    measured = head.ask(fs.newest_texts, head.runs, f"*/{MEASURED}", NEWEST)
    return Measurements(
        next(made, None),
        tuple(_readable(calibration.parse_measured, [(f"{head.name}: a run's {MEASURED}", each) for each in measured])),
        tuple(_readable(parse_result, [(f"{head.name}: a check's {RESULT}", each) for each in checks])),
    )


def measurements_of(cluster: str, node: Node | None) -> Measurements:
    """Of a cluster; `node`: its head, where it stands. One that does not answer in time is left out, with a note."""
    here = fetched_measurements(cluster)
    if node is None:
        return here
    try:
        with closing(RemoteHead(node)) as head:
            return here.and_also(within(HEAD_S, lambda: heads_measurements(head)))
    except (HeadError, TimeoutError) as error:
        return replace(here, notes=(f"what {node.name} has measured is not known: {error}",))


def _readable(parse: Callable[[str], T], contents: Iterable[tuple[str, str]]) -> Iterator[T]:
    """What can be read; of the rest it is said that it is left out. `contents`: where each lies, and what it holds."""
    for where, content in contents:
        try:
            yield parse(content)
        except ValueError as error:
            print(f"{where} is left out: {error}", file=sys.stderr)


def _texts(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        try:
            yield str(path), path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            print(f"{path} is left out: {error}", file=sys.stderr)
