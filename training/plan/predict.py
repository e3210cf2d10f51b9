"""A run's plan: what the recipe leaves open is decided, what it needs is estimated, the checks are run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from training.cost.memory import GIB, micro_batch_tokens
from training.cost.pace import pace
from training.cost.shape import PlanError
from training.cost.strategies import cost_of
from training.plan import data_checks, fits
from training.plan.data_checks import tokens_each_step
from training.plan.facts import Facts
from training.plan.fits import Check, Situation
from training.plan.ladder import memory_options
from training.plan.notes import Rounded, four_bits_faster
from training.plan.options import Search, choose
from training.recipe.reading import with_changes
from training.recipe.recipe import Recipe

CHECKS: Sequence[Callable[[Situation], Check]] = (
    data_checks.records,
    data_checks.skipped,
    data_checks.truncated,
    data_checks.duplicates,
    data_checks.leaks,
    data_checks.special_tokens,
    data_checks.template,
    data_checks.end_of_turn,
    data_checks.padding_token,
    data_checks.warmup,
    data_checks.epochs,
    data_checks.tokens_per_step,
    fits.saving,
    fits.gpu_memory,
    fits.host_ram,
    fits.disk,
    fits.number_type,
    fits.isolation,
    fits.rates,
    fits.duration,
    fits.machines,
    fits.tracking,
)


def run_checks(it: Situation, anyway: bool = False) -> list[Check]:
    """Every check, in the table's order; `anyway` turns errors that are only estimates into warnings."""
    checks = [check(it) for check in CHECKS]
    if anyway:
        checks = [replace(c, severity="warning") if c.estimated and c.severity == "error" else c for c in checks]
    return checks


# What a recipe leaves to the plan is decided from the same facts as the rest of it, before the launch.


def decided(recipe: Recipe, facts: Facts) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with nothing left open, and what was chosen, why; that is empty where nothing was open.

    Where nothing fits it is what lacks least: the plan says so then. Raises PlanError where no strategy can run it.
    """
    if not recipe.left_open:
        return recipe, {}
    choice = choose(facts.shape, recipe, facts.machines, facts.work, recipe.auto)
    if all(option.refused for option in choice.options):
        raise PlanError(choice.reason)
    chosen = choice.chosen or min(choice.options, key=lambda option: (bool(option.refused), option.missing_gib))
    values = {key: value for key, value in chosen.values.items() if key in recipe.left_open}
    return with_changes(recipe, **values, auto=()), {"settings": values, "reason": choice.reason}


DATA = ("shape", "records", "bad", "empty", "truncated", "samples", "tokens", "learned_tokens", "rows", "content_hash")


@dataclass(frozen=True)
class Plan:
    """The table, and the numbers that the run's report is held against."""

    recipe: Recipe
    """With what it left open decided."""
    checks: Sequence[Check]
    predicted: dict[str, Any]
    data: dict[str, Any]
    """What the run learns from, in short."""

    @property
    def errors(self) -> list[str]:
        return [check.sentence for check in self.checks if check.severity == "error"]


def make_plan(recipe: Recipe, facts: Facts, anyway: bool = False, named: Collection[str] = ()) -> Plan:
    """Estimate and judge a run; nothing is proposed for a key that is `named`. Raises PlanError where even the estimate
    is impossible."""
    report = facts.report
    if not report["rows"]:
        raise PlanError("no record has anything to learn from")
    original, (recipe, chosen) = recipe, decided(recipe, facts)
    if reason := cost_of(recipe).misfit(facts.shape, recipe, facts.ranks):
        raise PlanError(reason)
    tokens = micro_batch_tokens(recipe, report["longest"])
    memory = cost_of(recipe).memory(facts.shape, recipe, facts.ranks, tokens)
    at = facts.machines
    rates = at.rates.at_precision(recipe.dtype, facts.card is not None)
    speed = model = pace(facts.shape, recipe, facts.ranks, tokens, rates, span=facts.span)
    if correction := at.corrections.of(recipe.strategy, recipe.dtype, recipe.tuning):
        speed = model.scaled(correction.factor)
    total = recipe.total_steps(report["rows"])
    each = cost_of(recipe).memories(facts.shape, recipe, facts.ranks, tokens)
    _, tightest = at.tightest(each)
    situation = Situation(
        recipe,
        facts,
        each[tightest],
        speed,
        total,
        card=at.by_stage(len(each))[tightest],
        smaller=_smaller(recipe, facts),
        four_bits=None if "base_precision" in named else _four_bits(original, recipe, facts),
        flops_from=at.flops_from,
        correction=correction,
    )
    predicted = {
        "memory_gib": round(memory.held(gpu=facts.card is not None) / GIB, 3),
        "parts": {name: round(size / GIB, 3) for name, size in memory.parts.items()},
        "host_gib": round(memory.host / GIB, 3),
        "card": at.kinds,
        "card_gib": round(facts.card.bytes / GIB, 3) if facts.card else None,
        "step_s": _rounded(speed.step_s),
        "model_step_s": _rounded(model.step_s),
        "correction": None if correction is None else asdict(correction),
        "stop_grace_s": speed.stop_grace_s,
        "minutes": None if situation.minutes is None else round(situation.minutes, 1),
        "wire_gb": round(speed.wire_gb, 3),
        "tokens_per_step": round(tokens_each_step(situation)),
        "total_steps": total,
        "checkpoint_gib": round(speed.checkpoint_bytes / GIB, 3),
        "ranks": facts.ranks,
        "ranks_per_node": facts.ranks_per_node,
        "ram_gib": round(facts.ram_bytes / GIB, 3),
        "longest": report["longest"],
        "own_loss": bool(facts.card and facts.calibration and facts.calibration.prefers_own_loss(facts.card.name)),
        "rates": {
            "flops": at.rates.flops,
            "flops_from": at.flops_from,
            "bytes_per_s": facts.bytes_per_s,
            "from": facts.link_from,
        },
        "shape": facts.shape.to_outline(),
        "base_precision": recipe.base_precision,
        **({"chosen": chosen} if chosen else {}),
    }
    data = {key: report[key] for key in DATA if key in report}
    return Plan(recipe, run_checks(situation, anyway), predicted, data)


def _four_bits(original: Recipe, recipe: Recipe, facts: Facts) -> Rounded | None:
    """For a recipe that was decided from the one that was asked for."""
    search = Search(facts.shape, original, facts.machines, facts.work, original.auto)
    return four_bits_faster(search, search.option(recipe))


def _rounded(seconds: float | None) -> float | None:
    """To digits that count, however few the seconds are."""
    return None if seconds is None else float(f"{seconds:.6g}")


def _smaller(recipe: Recipe, facts: Facts) -> str:
    """The changes that make it fit, from the cheapest on; nothing where all together do not."""
    has = facts.card.bytes / GIB if facts.card else facts.ram_bytes / facts.ranks_per_node / GIB
    settings: dict[str, str] = {}
    for rung in memory_options(recipe, facts.shape, facts.ranks, facts.report["longest"], cards=facts.card is not None):
        settings |= dict(setting.split("=") for setting in rung.settings)
        if rung.leaves_gib <= has:
            return " ".join(f"--set {key}={value}" for key, value in settings.items())
    return ""
