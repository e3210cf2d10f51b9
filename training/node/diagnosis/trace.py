"""One Chrome trace of all ranks' profiles: `python -m training.node.diagnosis.trace --run DIR`.

Reads profile/rank-N.json.gz, writes profile/trace.json.gz, to be opened in ui.perfetto.dev or chrome://tracing,
and profile/summary.txt. Holds one rank's trace at a time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from training.run.folder import LAUNCH, PROFILE, SUMMARY, TRACE
from training.run.launch import LaunchError, parse_launch

Event = dict[str, Any]
Span = tuple[float, float]
FIRST_STREAM = 1_000_000_000
"""Above every thread's number."""
_FLOWS = {"s", "t", "f", "b", "n", "e"}
_ALL_WAIT = re.compile(r"gloo:(all_reduce|all_gather|barrier|reduce_scatter)\w*|ncclDevKernel_(All|ReduceScatter)\w*.*")
"""Collectives none of whose ranks can end before the last one has begun. NCCL's are its kernels: on the host they
only seem to be over."""


@dataclass(frozen=True)
class Clock:
    """What is to be known of a rank's trace before any of it is written."""

    base_ns: int
    """Since the epoch; the trace's own times, in us, count from it."""
    first_us: float
    collectives: Mapping[str, Sequence[Span]]
    """Begin and end of each by name, in order."""


def clock_of(trace: Mapping[str, Any]) -> Clock:
    """The times of one rank's trace."""
    spans: dict[str, list[Span]] = defaultdict(list)
    timed = [event for event in trace["traceEvents"] if event["ph"] != "M" and isinstance(event.get("pid"), int)]
    for event in timed:
        if event["ph"] == "X" and _ALL_WAIT.fullmatch(event["name"]):
            spans[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    first_us = min((event["ts"] for event in timed), default=0.0)
    collectives = {name: sorted(each) for name, each in spans.items()}
    return Clock(int(trace.get("baseTimeNanoseconds", 0)), first_us, collectives)


def shift_us(clock: Clock, reference: Clock) -> float:
    """What to add to a rank's times so that they fit another's.

    In each collective both ranks must have begun before either ends. Where the nodes' clocks agree with that they
    are believed; else the middle of what the collectives allow is taken. 0 where they contradict each other.
    """
    apart_us = (clock.base_ns - reference.base_ns) / 1000
    low, high = float("-inf"), float("inf")
    for name, spans in clock.collectives.items():
        others = reference.collectives.get(name, ())
        if len(others) != len(spans):
            continue
        for (begin, end), (other_begin, other_end) in zip(spans, others, strict=True):
            low = max(low, other_begin - end - apart_us)
            high = min(high, other_end - begin - apart_us)
    if low > high or low <= 0 <= high:
        return 0.0
    return (low + high) / 2


def events_of(trace: Mapping[str, Any], rank: int, node: str, move_us: float) -> Iterator[Event]:
    """A rank's events as one process, numbered by its rank; times moved, order kept."""
    own = next((event["pid"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"), None)
    streams: dict[tuple[int, Any], int] = {}
    yield _named("process_name", rank, 0, f"rank {rank} ({node})")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for event in trace["traceEvents"]:
        pid, tid = event.get("pid"), event.get("tid", 0)
        if not isinstance(pid, int) or event["name"].startswith("process_"):
            continue  # rows of the profiler's own; and names that are given above
        moved = event | {"pid": rank}
        if own is not None and pid != own:  # a GPU, whose streams become threads of its rank
            if event["ph"] == "M":
                continue
            if (pid, tid) not in streams:
                streams[pid, tid] = FIRST_STREAM + len(streams)
                yield _named("thread_name", rank, streams[pid, tid], f"GPU {pid} stream {tid}")
            moved["tid"] = streams[pid, tid]
        if event["ph"] == "M":
            moved.pop("ts", None)
        else:
            moved["ts"] = max(0.0, round(event["ts"] + move_us, 3))
        if event["ph"] in _FLOWS and "id" in event:  # arrows are joined by it, whatever the process
            moved["id"] = f"{rank}.{event['id']}"
        yield moved


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def merge(read: Mapping[int, Callable[[], Mapping[str, Any]]], node_of: Callable[[int], str], target: Path) -> None:
    """Write the traces of all ranks as one; each is read twice, and held no longer than needed."""
    clocks = {rank: clock_of(trace()) for rank, trace in read.items()}
    reference = clocks[min(clocks)]
    moves_us = {
        rank: (clock.base_ns - reference.base_ns) / 1000 + shift_us(clock, reference) for rank, clock in clocks.items()
    }
    origin_us = min(clock.first_us + moves_us[rank] for rank, clock in clocks.items())
    base_ns = reference.base_ns + round(origin_us * 1000)
    with gzip.open(target, "wt", compresslevel=4, encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "baseTimeNanoseconds": {base_ns}, "traceEvents": [')
        comma = "\n"
        for rank, trace in read.items():
            for event in events_of(trace(), rank, node_of(rank), moves_us[rank] - origin_us):
                file.write(comma + json.dumps(event, separators=(",", ":")))
                comma = ",\n"
        file.write("\n]}\n")


def read_trace(path: Path) -> dict[str, Any]:
    """A rank's trace as the profiler wrote it. Raises LaunchError where it is damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            trace: dict[str, Any] = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error
    return trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    run: Path = parser.parse_args().run
    launch = parse_launch((run / LAUNCH).read_text(encoding="utf-8"))
    paths = {rank: run / PROFILE / f"rank-{rank}.json.gz" for rank in range(launch.world_size)}
    read = {rank: partial(read_trace, path) for rank, path in paths.items() if path.exists()}
    if not read:
        print("no rank has left a profile", file=sys.stderr)
        return 1
    try:
        summaries = {rank: summarise(trace()["traceEvents"]) for rank, trace in read.items()}
        merge(read, lambda rank: launch.host_of(rank).name, run / PROFILE / TRACE)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    (run / PROFILE / SUMMARY).write_text(summary_text(summaries), encoding="utf-8")
    return 0


# Where a profiled rank's time went: operators by self time, and the share of communication.

TOP = 15
_COMMUNICATION = ("gloo:", "nccl:", "ncclDevKernel", "c10d::")


@dataclass(frozen=True)
class Summary:
    """One rank's profiled steps."""

    steps: int
    wall_us: float
    communication_us: float
    """In which at least one collective ran."""
    self_us: Mapping[str, float]
    """Time in an operator or kernel itself, without those it called."""
    calls: Mapping[str, int]


def summarise(events: Sequence[Mapping[str, Any]]) -> Summary:
    """Sum up a rank's trace."""
    timed = [event for event in events if event["ph"] == "X" and isinstance(event["pid"], int)]
    work = [event for event in timed if event.get("cat") in {"cpu_op", "kernel"}]
    kernels = any(event.get("cat") == "kernel" for event in work)
    # on a GPU's row they appear once more
    steps = [e for e in timed if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"]
    self_us: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    lanes: dict[tuple[int, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in work:
        lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        for name, own_us in _self_times(lane):
            self_us[name] += own_us
            calls[name] += 1
    talk = [  # with kernels in the trace only they count: on the host NCCL's calls are over at once
        event
        for event in timed
        if event["name"].startswith(_COMMUNICATION) and (not kernels or event.get("cat") == "kernel")
    ]
    begin, end = (min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)) if steps else (0.0, 0.0)
    spans = ((max(begin, e["ts"]), min(end, e["ts"] + e["dur"])) for e in talk)
    return Summary(len(steps), end - begin, covered_us(spans), self_us, calls)


def _self_times(lane: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """(name, time without the calls inside) of one thread's nested events."""
    times: list[list[Any]] = []
    open_calls: list[tuple[float, int]] = []
    for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
        while open_calls and open_calls[-1][0] <= event["ts"]:
            open_calls.pop()
        if open_calls:
            times[open_calls[-1][1]][1] -= event["dur"]
        open_calls.append((event["ts"] + event["dur"], len(times)))
        times.append([event["name"], event["dur"]])
    return [(name, own_us) for name, own_us in times]


def covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def summary_text(summaries: Mapping[int, Summary]) -> str:
    """summary.txt: a line a rank, then the operators all ranks spent most time in."""
    lines = []
    for rank, summary in summaries.items():
        share = summary.communication_us / summary.wall_us if summary.wall_us else 0.0
        each_ms = summary.wall_us / 1000 / max(1, summary.steps)
        lines.append(f"rank {rank}: {summary.steps} steps of {each_ms:.1f} ms, communication {share:.0%} of the time")
    self_us: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for summary in summaries.values():
        calls.update(summary.calls)
        for name, own_us in summary.self_us.items():
            self_us[name] += own_us
    whole = sum(self_us.values()) or 1.0
    lines += ["", f"{'self time of all ranks':>24}  {'share':>6}  {'calls':>7}  operator"]
    for name, own_us in sorted(self_us.items(), key=lambda item: -item[1])[:TOP]:
        lines.append(f"{own_us / 1000:>21.2f} ms  {own_us / whole:>6.1%}  {calls[name]:>7}  {name[:90]}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
