"""Will it run? What memory, disk, the cards and the clock say; and what all checks look at. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from training.cost.cards import lacks_bfloat16, too_old
from training.cost.memory import Memory, kept_checkpoints, with_reserve
from training.cost.pace import Pace, validation_steps
from training.cost.strategies import cost_of
from training.plan.calibration import Correction
from training.plan.facts import Facts
from training.plan.machines import SYSTEM, TIGHT, RankCard
from training.plan.notes import MIXTURES, SETTING, Rounded
from training.recipe.model_types import CURE, mixing, never_trained, types_of
from training.recipe.recipe import Recipe
from training.text.counts import many, plain, size_text

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Check:
    """One row: what was looked at, what was found, and what to do about it."""

    name: str
    severity: Severity
    value: str
    cure: str = ""
    estimated: bool = False
    """A judgement or an estimate, which `--anyway` overrules; the rest are facts."""

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.value}{f'; {self.cure}' if self.cure else ''}"


@dataclass(frozen=True)
class Situation:
    """What the checks look at."""

    recipe: Recipe
    facts: Facts
    memory: Memory
    """Of the rank whose card is filled most."""
    pace: Pace
    total_steps: int
    card: RankCard
    """That rank's, or its share of the RAM."""
    smaller: str = ""
    """Changes that would make it fit, as `--set` takes them; empty where none would."""
    four_bits: Rounded | None = None
    """Where the frozen layers in four bits each would be much faster."""
    flops_from: str = ""
    """Where the card's rate is known from; empty where it is not."""
    correction: Correction | None = None
    """Of its seconds, by what runs took."""

    @property
    def epochs(self) -> float:
        return self.total_steps * self.recipe.global_batch / max(1, self.facts.report["rows"])

    @property
    def minutes(self) -> float | None:
        looks = validation_steps(self.recipe, self.total_steps, self.facts.report["rows"])
        return self.pace.minutes(self.total_steps + looks)


UNSAVED_MINUTES = 30
LONG_MINUTES = 24 * 60


def saving(it: Situation) -> Check:
    together = it.recipe.sync_every
    every, total = math.ceil(it.recipe.save_every / together) * together, it.total_steps
    stop = f"a stop waits up to {it.pace.stop_grace_s} s for the last one"
    value = f"every {every} of {many(total, 'step')}; {stop}"
    lost = 0.0 if it.pace.step_s is None else min(every, total) * it.pace.step_s / 60
    if lost > UNSAVED_MINUTES:
        better = max(1, int(min(every, total) * UNSAVED_MINUTES / lost))
        cure = f"a machine taken away costs up to {lost:.0f} min; --set save_every={better}"
        return Check("saving", "warning", value, cure)
    if every >= total:
        return Check("saving", "ok", f"once, at the end, after {many(total, 'step')}; {stop}")
    return Check("saving", "ok", value)


def gpu_memory(it: Situation) -> Check:
    card = it.card
    if it.facts.card is None:
        saved = it.memory.saved / it.facts.ranks_per_node  # by the head's first rank alone
        need, has = it.memory.held(gpu=False) + it.memory.host + saved, it.facts.ram_bytes / it.facts.ranks_per_node
        name = "memory a rank"
    else:
        need, has = with_reserve(it.memory.held(gpu=True), gpu=True), card.has_bytes
        name = "GPU memory"
    value = f"{size_text(need)} of {size_text(has)}{f' of {card.card}' if card.card else ''}"
    way = it.smaller or "nothing in the recipe would do; take a smaller model, more machines or larger cards"
    cure = f"the largest parts are {_largest(it.memory)}; to fit: {way}"
    if need > has:
        return Check(name, "error", value, cure, estimated=True)
    if need > TIGHT * has:
        return Check(name, "warning", value, cure, estimated=True)
    return Check(name, "ok", value, estimated=True)


def _largest(memory: Memory) -> str:
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:2]
    return " and ".join(f"{name} ({size_text(size)})" for name, size in parts)


def host_ram(it: Situation) -> Check:
    """The head's, which gathers a whole model's state to save it."""
    offloaded, saved = it.memory.host * it.facts.ranks_per_node, it.memory.saved
    if not offloaded + saved or it.facts.card is None:
        return Check("RAM", "ok", "nothing is offloaded")
    need = offloaded + saved + SYSTEM
    what = " and ".join(["what is offloaded"] * bool(offloaded) + ["a save on the head"] * bool(saved))
    value = f"{size_text(need)} of {size_text(it.facts.ram_bytes)} a node for {what}"
    if need > it.facts.ram_bytes:
        cure = "the system would kill the ranks; offload less, or take machines with more RAM"
        if not offloaded:
            cure = "the system would kill the head's ranks; take machines with more RAM, or --set tuning=lora"
        return Check("RAM", "error", value, cure, estimated=True)
    return Check("RAM", "ok", value, estimated=True)


def isolation(it: Situation) -> Check:
    """Samples that share a row must not see each other."""
    kinds = types_of(it.facts.config) or ("unnamed",)
    if never := never_trained(kinds):
        return Check("model", "error", never, "take another base model")
    reason = next(filter(None, (mixing(kind, it.recipe) for kind in kinds)), "")
    return Check("batching", "error", reason, CURE) if reason else Check("batching", "ok", it.recipe.batching)


def disk(it: Situation) -> Check:
    recipe = it.recipe
    checkpoints = kept_checkpoints(recipe)
    need, free = checkpoints * it.pace.checkpoint_bytes, it.facts.disk_free_bytes
    value = (
        f"{size_text(need)} of {size_text(free)} free, for {many(checkpoints, 'checkpoint')}, the one being saved too"
    )
    if full := it.facts.full_nodes:
        look = "; ".join(f"fab ssh {name} -- du -xh --max-depth=2 /data" for name in full)
        return Check("disk", "error", f"less than 1 GiB is free on {', '.join(full)}", f"free space: {look}")
    if need > free:
        return Check("disk", "error", value, "delete old runs, or --set keep_checkpoints=1")
    return Check("disk", "ok", value)


def number_type(it: Situation) -> Check:
    kinds, dtype = dict.fromkeys(card.name for card in (*it.facts.mixed, it.facts.card) if card), it.recipe.dtype
    if old := next(filter(too_old, kinds), None):
        return Check("card", "error", f"torch has no kernels for {old}", "take cards from T4 on")
    without = next(filter(lacks_bfloat16, kinds), None)
    if not kinds and dtype == "float16":
        return Check("dtype", "error", "float16 needs a GPU", "--set dtype=bfloat16, or float32")
    if without and dtype == "bfloat16":
        return Check("dtype", "error", f"{without} has no bfloat16", "--set dtype=float16")
    if kinds and not without and dtype == "float16":
        names = " and ".join(kinds)
        return Check("dtype", "warning", f"float16 overflows, {names} has bfloat16", "--set dtype=bfloat16")
    return Check("dtype", "ok", dtype)


def rates(it: Situation) -> Check:
    """Whose word the estimate of time goes by."""
    computing = f"computing: {it.flops_from}" if it.flops_from else "computing not known"
    link = it.facts.bytes_per_s
    network = (
        f"network {plain(link / 1e9)} GB/s from {it.facts.link_from}"
        if link
        else "network not measured yet (fab check)"
    )
    corrected = f"; seconds {it.correction.words}" if it.correction else ""
    return Check("rates", "ok", f"{computing}; {network}{corrected}")


def duration(it: Situation) -> Check:
    pace, minutes = it.pace, it.minutes
    if minutes is None or pace.step_s is None:
        unknown = "this kind of card" if pace.compute_s is None else "the network, which `fab check` measures"
        return Check("time", "ok", f"not estimated: nothing is known of {unknown}")
    value = f"about {minutes:.0f} min, {pace.step_s:{'.1f' if pace.step_s >= 0.05 else '.1g'}} s a step"
    slower = it.facts.shape.mixture and not it.correction
    if slower:
        value = f"{value}; {MIXTURES}"
    faster = it.four_bits.sentence(f"--set {SETTING}") if it.four_bits else ""
    if pace.compute_s and pace.wire_s and pace.wire_s > 2 * pace.compute_s:
        lighter = faster or cost_of(it.recipe).LIGHTER
        cure = f"{pace.wire_gb:.1f} GB cross the network in a step; {lighter}"
        return Check("time", "warning", value, cure, estimated=True)
    if faster:
        return Check("time", "warning", value, faster, estimated=True)
    if minutes > LONG_MINUTES:
        return Check("time", "warning", value, "more than a day", estimated=True)
    return Check("time", "warning" if slower else "ok", value, estimated=True)


def machines(it: Situation) -> Check:
    each, nodes = it.facts.ranks_per_node, it.facts.ranks // it.facts.ranks_per_node
    value = f"{nodes} node{'s' * (nodes > 1)}, {each} rank{'s' * (each > 1)} on each"
    return Check("machines", "ok", value)


def tracking(it: Situation) -> Check:
    """Whether the login is there, only the head could tell: the plan says what is needed."""
    chosen = it.recipe.logging.wandb
    if chosen != "online":
        return Check("Weights & Biases", "ok", chosen)
    value = "online, with the head's own login: no key is sent there"
    cure = "if it has none yet, once: `ssh HEAD`, and as root `/data/env/bin/wandb login`; the key stays in ~/.netrc"
    return Check("Weights & Biases", "warning", value, cure)
