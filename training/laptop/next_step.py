"""What to type after `fab plan`: the start that decides the same, or what would fit. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from training.counting import many
from training.laptop.plan_options import PlanQuestion, PlanWish
from training.model_names import typed
from training.plan.notes import SETTING
from training.plan.options import Choice, Search, choose, in_four_bits

MORE = (2, 4, 8)
"""Numbers of nodes that are tried where nothing fits."""


def start(asked: PlanQuestion) -> str:
    """The start that decides the same. It is left to it: what is pinned cannot be laid out anew when a node is gone."""
    its, wish = asked.fleet, asked.wish
    if not its.own:
        return (
            f"a what-if, so no start is proposed: {many(its.nodes, 'node')}, each {asked.each_node}; fab train decides "
            "anew for the cluster's own machines"
        )
    left = [f"{key}=auto" for key in wish.free if key not in asked.recipe.auto]
    settings = [*wish.settings, *(["dtype=float16"] if asked.lacks_dtype else []), *left]
    words = ["fab", "train", "--model", typed(asked.recipe), *_data(wish)]
    return f"next: {shlex.join([*words, *_repeated('--set', settings)])}"


def where_nothing_fits(asked: PlanQuestion, choice: Choice) -> str | None:
    """What would fit; None where the recipe itself is what no machine can run."""
    if all(option.refused for option in choice.options):
        return None
    work = asked.size.work if asked.size else None
    if in_four_bits(Search(asked.shape, asked.recipe, asked.machines, work, asked.wish.free)):
        return f"next: {in_four_bits_too(asked)}"
    each = asked.machines.ranks_per_node
    counts = () if asked.machines.mixed else (n for n in MORE if n > asked.fleet.nodes)
    for count in counts:
        more = replace(asked.machines, ranks=count * each)
        if (
            more.ranks <= asked.recipe.global_batch
            and choose(asked.shape, asked.recipe, more, work, asked.wish.free).chosen
        ):
            return f"next: {many(count, 'such node')} would do: {_plan(asked, asked.wish.settings, count)}"
    return "next: a larger card, with --card"


def in_four_bits_too(asked: PlanQuestion) -> str:
    """The same plan with the frozen layers rounded."""
    return _plan(asked, [*asked.wish.settings, SETTING])


def _plan(asked: PlanQuestion, settings: Iterable[str], nodes: int = 0) -> str:
    """This plan with other values."""
    wish = asked.wish
    flags: dict[str, str | float] = {
        "--nodes": nodes or wish.nodes,
        "--hours": wish.hours,
        "--card": wish.card,
        "--line-rate-gbps": wish.line_rate_gbps,
        "--price-per-hour": wish.price_per_hour,
    }
    said = [word for flag, value in flags.items() if value for word in (flag, _text(value))]
    words = ["fab", "plan", "--model", typed(asked.recipe), *_data(wish)]
    return shlex.join([*words, *said, *_repeated("--set", settings)])


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _data(wish: PlanWish) -> list[str]:
    return [*_repeated("--data", wish.data), *(["--skip-bad"] if wish.skip_bad else [])]


def _repeated(flag: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]
