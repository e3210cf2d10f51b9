"""Where a profiled rank's time went: operators by self time, and the share of communication. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    talk = [event for event in timed if _communicates(event, kernels)]
    begin, end = (min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)) if steps else (0.0, 0.0)
    spans = ((max(begin, e["ts"]), min(end, e["ts"] + e["dur"])) for e in talk)
    return Summary(len(steps), end - begin, covered_us(spans), self_us, calls)


def _communicates(event: Mapping[str, Any], kernels: bool) -> bool:
    """With kernels in the trace only they count: on the host NCCL's calls are over at once."""
    return event["name"].startswith(_COMMUNICATION) and (not kernels or event.get("cat") == "kernel")


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
