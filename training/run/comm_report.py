"""What the numbers of a communication check mean: bandwidths, slow pairs, changes since last time. Pure.

Definitions are those of nccl-tests (doc/PERFORMANCE.md): algbw is the size over the time; busbw multiplies it
by the share that crosses each rank's link, so that it compares with the line rate whatever the rank count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from training.text.counts import size_text
from training.text.files import bounded_json

BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}
SLOWER_SHARE = 0.75
"""A pair below this share of the median pair is called slow, and a number below it since last time a loss."""
LINE_RATE_SHARE = 0.6
"""TCP and gloo do not reach the line rate; below this share of it something is wrong."""

MOST = 1e300
"""That a number can be: infinity is none."""
Result = Mapping[str, Any]
Rows = list[list[str]]
VALUES: Mapping[str, type] = {"run_id": str, "time": float, "backend": str, "world_size": float}
ROWS: Mapping[str, Mapping[str, type]] = {
    "nodes": {"node": str},
    "checks": {"operation": str, "dtype": str, "ok": bool, "detail": str},
    "pairs": {"from": str, "to": str, "gbit_s": float},
    "sweep": {"operation": str, "bytes": float, "seconds": float, "algbw_gbyte_s": float, "busbw_gbyte_s": float},
}
"""What every result has; of each list what its rows have. Numbers are from 0 up."""


def parse_result(text: str) -> Result:
    """The result in a JSON text; ValueError where it is none, or misses what every result has."""
    result = bounded_json(text, float)
    required = VALUES.keys() | ROWS.keys()
    missing = required - result.keys() if isinstance(result, dict) else required
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    _refuse_others("", result, VALUES)
    for part, kinds in ROWS.items():
        if not isinstance(result[part], list) or not all(isinstance(row, dict) for row in result[part]):
            raise ValueError(f"its {part} are no list of rows")
        for row in result[part]:
            _refuse_others(f"{part}: ", row, kinds)
    return result


def _refuse_others(where: str, row: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        value = row.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST
        if not (number if kind is float else isinstance(value, kind)):
            wanted = {float: "number from 0 up", str: "text", bool: "true or false"}[kind]
            raise ValueError(f"{where}{name} is {value!r:.60}, and no {wanted}")


def node_names(result: Result) -> tuple[str, ...]:
    """The nodes that took part, each once."""
    return tuple(dict.fromkeys(node["node"] for node in result["nodes"]))


def algbw_gbyte_s(size: int, seconds: float) -> float:
    """Bytes of the whole array over the time. For all-gather and reduce-scatter that is all ranks' parts."""
    return size / seconds / 1e9


def busbw_gbyte_s(operation: str, size: int, seconds: float, world: int) -> float:
    """algbw times the operation's bus factor."""
    return algbw_gbyte_s(size, seconds) * BUS_FACTORS[operation](world)


def slowest_pair(result: Result) -> Mapping[str, Any] | None:
    """The ordered pair of nodes with the least bandwidth."""
    return min(result["pairs"], key=lambda pair: pair["gbit_s"], default=None)


def best_busbw(result: Result, operation: str) -> float:
    """The largest busbw of a collective's sweep, in GB/s."""
    return max((row["busbw_gbyte_s"] for row in result["sweep"] if row["operation"] == operation), default=0.0)


def problems(result: Result, line_rate_gbps: float | None = None) -> list[str]:
    """What is wrong with a result by itself, most serious first, one sentence each."""
    sentences = [
        f"{check['operation']} in {check['dtype']} gives wrong results: {check['detail']}"
        for check in result["checks"]
        if not check["ok"]
    ]
    for node in result["nodes"]:
        expected = node["interface_expected"]
        wrong = ", ".join(sorted(set(node["interfaces_used"]) - {expected, "lo"}))
        if expected and wrong:
            sentences.append(f"{node['node']} talks over {wrong} instead of {expected}")
    sentences += _slow_pairs(result)
    slowest = slowest_pair(result)
    if line_rate_gbps and slowest and slowest["gbit_s"] < LINE_RATE_SHARE * line_rate_gbps:
        sentences.append(
            f"{slowest['from']} -> {slowest['to']} reaches {slowest['gbit_s']:.2f} of "
            f"{line_rate_gbps:g} Gbit/s line rate"
        )
    return sentences


def _slow_pairs(result: Result) -> list[str]:
    if len(result["pairs"]) < 4:
        return []
    usual = statistics.median(pair["gbit_s"] for pair in result["pairs"])
    return [
        f"{pair['from']} -> {pair['to']} is slow: {pair['gbit_s']:.2f} Gbit/s where the median pair has {usual:.2f}"
        for pair in sorted(result["pairs"], key=lambda pair: pair["gbit_s"])
        if pair["gbit_s"] < SLOWER_SHARE * usual
    ]


def wrong_results(result: Result) -> bool:
    """Whether any operation computed something wrong: no training should start then."""
    return not all(check["ok"] for check in result["checks"])


def comparison(result: Result, previous: Result | None) -> list[str]:
    """What changed against an earlier check of the same nodes, one sentence each."""
    if previous is None:
        return ["no earlier check of these nodes to compare with"]
    lines = []
    for operation in ("all_reduce", "all_gather"):
        if old := best_busbw(previous, operation):
            lines.append(_change(f"{operation} busbw", old, best_busbw(result, operation), "GB/s"))
    earlier = {(pair["from"], pair["to"]): pair["gbit_s"] for pair in previous["pairs"]}
    for pair in result["pairs"]:
        before = earlier.get((pair["from"], pair["to"]))
        if before and pair["gbit_s"] < SLOWER_SHARE * before:
            lines.append(_change(f"{pair['from']} -> {pair['to']}", before, pair["gbit_s"], "Gbit/s"))
    return lines


def _change(what: str, before: float, now: float, unit: str) -> str:
    return f"{what}: {now:.2f} {unit}, {before:.2f} last time ({now / before - 1:+.0%})"


def pair_table(result: Result) -> tuple[list[str], Rows]:
    """Gbit/s from each node (row) to each other (column)."""
    names = node_names(result)
    speed = {(pair["from"], pair["to"]): pair for pair in result["pairs"]}
    rows = [[a, *(f"{speed[a, b]['gbit_s']:.2f}" if (a, b) in speed else "-" for b in names)] for a in names]
    return ["Gbit/s from \\ to", *names], rows


def sweep_table(result: Result) -> tuple[list[str], Rows]:
    """Size, time, algbw and busbw of each collective."""
    rows = [
        [
            row["operation"],
            size_text(row["bytes"]),
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['algbw_gbyte_s']:.3f}",
            f"{row['busbw_gbyte_s']:.3f}",
        ]
        for row in result["sweep"]
    ]
    return ["operation", "size", "ms", "algbw GB/s", "busbw GB/s"], rows


def interface_table(result: Result) -> tuple[list[str], Rows]:
    """Expected and used interface of each rank's node."""
    rows = [
        [
            str(node["rank"]),
            node["node"],
            node["interface_expected"] or "any",
            ", ".join(node["interfaces_used"]) or "none",
        ]
        for node in result["nodes"]
    ]
    return ["rank", "node", "expected", "used"], rows


def check_lines(result: Result) -> list[str]:
    """One line an operation: in which dtypes it is right or wrong."""
    operations: dict[str, list[Mapping[str, Any]]] = {}
    for check in result["checks"]:
        operations.setdefault(check["operation"].split(" from ")[0], []).append(check)
    return [
        f"{operation}: {'right' if all(c['ok'] for c in checks) else 'WRONG'} "
        f"({', '.join(dict.fromkeys(c['dtype'] for c in checks))})"
        for operation, checks in operations.items()
    ]


def _measured(result: Result) -> tuple[Any, ...]:
    """What must be the same for two checks' numbers to be comparable."""
    nodes = sorted({node["node"] for node in result["nodes"]})
    return result.get("cluster"), nodes, result["backend"], result["world_size"]


def this_and_previous(results: Sequence[Result], run_id: str) -> tuple[Result, Result | None]:
    """One check out of many, and the newest of those before it that measured the same."""
    this = next(result for result in results if result["run_id"] == run_id)
    earlier = [result for result in results if result["time"] < this["time"] and _measured(result) == _measured(this)]
    return this, max(earlier, key=lambda result: result["time"], default=None)
