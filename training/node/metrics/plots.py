"""A run's curves as SVG for a page: colours and fonts come from the page's own CSS, text stays text."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.text.catalogue import ENGLISH, Say

Row = dict[str, Any]

MOST_POINTS = 500
"""Longer curves show the mean of neighbouring steps."""
INK = "#010203"
COLOURS = {"#010204": "var(--first)", "#010205": "var(--second)", "#010206": "var(--third)", "#010207": "var(--fourth)"}
"""What matplotlib draws with, and what the page makes of it in light and dark."""
BAD = "#010208"


@dataclass(frozen=True)
class PlotLine:
    """One line of a plot: the key in metrics.jsonl, its name, a factor for its unit."""

    key: str
    name: str
    factor: float = 1.0
    evaluation: bool = False
    dashed: bool = False
    """Where it may lie upon another one, which is to be seen through it."""


@dataclass(frozen=True)
class Plot:
    """A plot by its title; `level` is a value known beforehand, drawn across."""

    title: str
    unit: str
    curves: tuple[PlotLine, ...]
    level: tuple[str, float] | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class PlotMark:
    """A step that is marked in every plot: where the run was gone on with, or where it was cut short."""

    step: int
    stop: bool = False


@dataclass(frozen=True)
class Drawn:
    """A plot as SVG text, to be put into a page as it is."""

    title: str
    svg: str
    mean_of: int
    """How many steps a point stands for."""


def plots(predicted: Row) -> list[Plot]:
    """All there may be to draw, in the order of interest; `predicted` is the plan's part of plan.json."""
    memory = predicted.get("memory_gib")
    return [
        Plot("Loss", "", (PlotLine("loss", "training"), PlotLine("validation_loss", "validation", evaluation=True))),
        Plot(
            "Token accuracy",
            "%",
            (
                PlotLine("token_accuracy", "training", 100),
                PlotLine("token_accuracy", "validation", 100, evaluation=True),
            ),
        ),
        Plot(
            "Pairs preferred",
            "%",
            (
                PlotLine("reward_accuracy", "training", 100),
                PlotLine("reward_accuracy", "validation", 100, evaluation=True),
            ),
        ),
        Plot(
            "Rewards",
            "",
            (
                PlotLine("chosen_reward", "chosen"),
                PlotLine("rejected_reward", "rejected"),
                PlotLine("reward_margin", "margin"),
            ),
        ),
        Plot("Learning rate", "", (PlotLine("lr", "learning rate"),), from_zero=True),
        Plot("Gradient norm", "", (PlotLine("grad_norm", "before clipping"),), from_zero=True),
        Plot(
            "Speed",
            "tokens/s",
            (PlotLine("tokens_per_s", "useful"), PlotLine("padded_tokens_per_s", "with padding", dashed=True)),
            from_zero=True,
        ),
        Plot(
            "Memory",
            "GiB",
            (PlotLine("memory_gib", "most held"),),
            ("planned", memory) if memory else None,
            from_zero=True,
        ),
        Plot(
            "Utilisation",
            "%",
            (
                PlotLine("mfu", "MFU", 100),
                PlotLine("hfu", "HFU", 100),
                PlotLine("gpu_utilization", "GPU busy", 100),
            ),
            from_zero=True,
        ),
        Plot("Waiting", "%", (PlotLine("communication_share", "waiting for ranks", 100),), from_zero=True),
    ]


def draw(
    plot: Plot, steps: Sequence[Row], evaluations: Sequence[Row], marks: Sequence[PlotMark] = (), say: Say = ENGLISH
) -> Drawn | None:
    """The plot, or None where the run has nothing to show in it."""
    size = max(1, -(-len(steps) // MOST_POINTS))
    lines = []
    for curve in plot.curves:
        rows = evaluations if curve.evaluation else steps
        points = [(row["step"], row[curve.key] * curve.factor) for row in rows if row.get(curve.key) is not None]
        if points:
            lines.append((curve, points if curve.evaluation else means(points, size)))
    if not lines:
        return None
    return Drawn(say(plot.title), _svg(_said(plot, say), lines, marks, say), size)


def _said(plot: Plot, say: Say) -> Plot:
    level = (say(plot.level[0]), plot.level[1]) if plot.level else None
    return replace(plot, title=say(plot.title), unit=say(plot.unit) if plot.unit else "", level=level)


def means(points: Sequence[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    """Each `size` neighbours as one point: their last step, their mean value."""
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


Lines = Sequence[tuple[PlotLine, Sequence[tuple[float, float]]]]


def _svg(plot: Plot, lines: Lines, marks: Sequence[PlotMark], say: Say) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": plot.title,
        "path.simplify": False,
        "font.size": 13,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        # the letters are the browser's: matplotlib's own font, which has none for Chinese, only measures them
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.add_subplot()
        _fill(axes, plot, lines, say)
        for mark in marks:
            gid, line, colour = ("stop", ":", BAD) if mark.stop else ("resume", "--", INK)
            axes.axvline(mark.step, gid=f"{gid}-{mark.step}", ls=line, color=colour, lw=1.2, alpha=0.8)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return for_page(text.getvalue(), plot.title)


def _fill(axes: Any, plot: Plot, lines: Lines, say: Say) -> None:
    from matplotlib.ticker import MaxNLocator

    colours = dict(zip(plot.curves, COLOURS, strict=False))
    for curve, points in lines:
        marker, style = "o" if curve.evaluation or len(points) == 1 else "", "--" if curve.dashed else "-"
        (line,) = axes.plot(*zip(*points, strict=True), color=colours[curve], lw=1.6, ls=style, marker=marker, ms=4)
        line.set_label(say(curve.name))
        line.set_gid(f"{'validation-' if curve.evaluation else ''}{curve.key}")
    if plot.level:
        axes.axhline(plot.level[1], color=INK, lw=1, ls="--", label=plot.level[0])
    if plot.from_zero:
        most = max(value for _, points in lines for _, value in points)
        axes.set_ylim(0, 1.08 * max(most, plot.level[1] if plot.level else 0) or 1)
    axes.set_xlabel(say("step"))
    axes.set_ylabel(plot.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(steps := {step for _, points in lines for step, _ in points}) == 1:
        axes.set_xlim(min(steps) - 1, min(steps) + 1)  # there is no part of a step
    axes.grid(alpha=0.15, lw=0.6)
    if len(plot.curves) > 1 or plot.level:
        axes.legend(frameon=False, fontsize=12, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, columnspacing=1)


def for_page(svg: str, title: str) -> str:
    """matplotlib's file as a part of an HTML page: no metadata, no addresses, no fonts and colours of its own."""
    changes: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
        (r"(?s)^.*?(?=<svg)", ""),
        (r"(?s)<metadata>.*?</metadata>\s*", ""),
        (r"(?s)<!--.*?-->\s*", ""),
        (r"\sxmlns(:xlink)?=\"[^\"]*\"", ""),
        (r"(<svg[^>]*?)\swidth=\"[^\"]*\"", r"\1"),
        (r"(<svg[^>]*?)\sheight=\"[^\"]*\"", r"\1"),
        (r"<svg", f'<svg role="img" aria-label="{title}"'),
        (r"font-family: [^;\"]*", "font-family: var(--font)"),
        (INK, "currentColor"),
        (BAD, "var(--bad)"),
        *COLOURS.items(),
    ]
    for pattern, replacement in changes:
        svg = re.sub(pattern, replacement, svg)
    return svg
