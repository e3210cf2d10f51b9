"""The table before launch: each check is a function of the situation and gives one row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from training.plan import running, teaching
from training.plan.situation import Check, Situation

CHECKS: Sequence[Callable[[Situation], Check]] = (
    teaching.records,
    teaching.skipped,
    teaching.truncated,
    teaching.duplicates,
    teaching.leaks,
    teaching.special_tokens,
    teaching.template,
    teaching.end_of_turn,
    teaching.padding_token,
    teaching.warmup,
    teaching.epochs,
    teaching.tokens_per_step,
    running.saving,
    running.gpu_memory,
    running.host_ram,
    running.disk,
    running.number_type,
    running.isolation,
    running.rates,
    running.duration,
    running.machines,
    running.tracking,
)


def run_checks(it: Situation, anyway: bool = False) -> list[Check]:
    """Every check, in the table's order; `anyway` turns errors that are only estimates into warnings."""
    found = [check(it) for check in CHECKS]
    if anyway:
        found = [replace(c, severity="warning") if c.estimated and c.severity == "error" else c for c in found]
    return found
