"""`fab plan`: every strategy for a model on the cluster's machines, with time and money, and which to take."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from inventory.settings import Settings
from inventory.shown import console, table
from training.cost.cards import lacks_bfloat16, too_old
from training.cost.memory import micro_batch_tokens
from training.cost.money import money
from training.cost.shape import ModelShape, PlanError, known_shape
from training.cost.strategies import STRATEGIES
from training.laptop.data_size import Size, size_of
from training.laptop.machines import Fleet, fleet, machines
from training.laptop.measurements import known
from training.plan import slow_link
from training.plan.machines import Machines
from training.plan.options import Choice, Option, choose
from training.recipe import LEFT_TO_THE_PLAN, Recipe, with_changes

if TYPE_CHECKING:
    from rich.console import Console

WHAT = ("", "strategy", "micro_batch", "layers again", "GiB a rank", "bound by")
NONE = "-"
WIDTH = 160
ABOVE_0 = "it has to be above 0, and finite"


@dataclass(frozen=True)
class Wish:
    """The flags of `fab plan`; 0 and empty: as the cluster is."""

    data: str = ""
    nodes: int = 0
    hours: float = 0.0
    """That the machines are there."""
    card: str = ""
    line_rate_gbps: float = 0.0
    settings: tuple[str, ...] = ()
    """What the recipe was changed by, as `--set` takes it."""

    @property
    def named(self) -> frozenset[str]:
        """The keys that have a value by these."""
        pairs = (setting.partition("=") for setting in self.settings)
        return frozenset(key.strip() for key, _, value in pairs if value.strip() != "auto")

    @property
    def free(self) -> tuple[str, ...]:
        """What options may choose: what nobody has named."""
        return tuple(key for key in LEFT_TO_THE_PLAN if key not in self.named)


@dataclass(frozen=True)
class Asked:
    """What options are wanted for, and what is known of it."""

    wish: Wish
    recipe: Recipe
    shape: ModelShape
    fleet: Fleet
    machines: Machines
    size: Size | None
    notes: tuple[str, ...] = ()
    """What could not be found out."""

    @property
    def lacks_dtype(self) -> bool:
        """Whether a card has nothing for the recipe's bfloat16."""
        return self.recipe.dtype == "bfloat16" and any(map(lacks_bfloat16, self.cards))

    @property
    def cards(self) -> list[str]:
        """Their kinds; none where ranks compute on the CPU."""
        kinds = [each.card for each in self.machines.mixed] or [self.machines.card or ""]
        return [kind for kind in dict.fromkeys(kinds) if kind]


def look(settings: Settings, recipe: Recipe, wish: Wish) -> Asked:
    """Gather what the options are made from. Raises PlanError for flags and models that cannot be planned, DataError,
    and LaunchError where nothing is known of the machines."""
    shape, size = subject(recipe, wish)
    found = fleet(settings, wish.nodes, wish.card)
    if wish.line_rate_gbps:
        found = replace(found, line_rate_gbps=wish.line_rate_gbps)
    as_it_is = not (wish.card or wish.line_rate_gbps)
    measured = known(settings.name, found.head if as_it_is else None)
    at = machines(settings, found, as_it_is, measured)
    asked = Asked(wish, recipe, shape, found, at, size, measured.notes)
    if old := next(filter(too_old, asked.cards), ""):
        raise PlanError(f"torch has no kernels for {old}: take cards from T4 on")
    return asked


def subject(recipe: Recipe, wish: Wish) -> tuple[ModelShape, Size | None]:
    """The model to be planned, and how much it is to learn. Raises PlanError for flags and models that cannot be
    planned, DataError."""
    flags = {"--nodes": wish.nodes, "--hours": wish.hours, "--line-rate-gbps": wish.line_rate_gbps}
    if wrong := next((flag for flag, value in flags.items() if not 0 <= value < inf), ""):
        raise PlanError(f"{wrong} {flags[wrong]:g}: {ABOVE_0}")
    shape = known_shape(recipe.base_model)
    if shape is None:
        raise PlanError(
            f"the shape of {recipe.base_model} is not known here: add what its config.json says to "
            "training/cost/shapes.toml; fab train --dry plans with the model on the head"
        )
    return shape, size_of(wish.data, recipe)


def hours_of(text: str) -> float:
    """What `--hours` says; 0 where it says nothing. Raises PlanError for what is no time."""
    if not text:
        return 0.0
    try:
        hours = float(text)
    except ValueError as error:
        raise PlanError(f"--hours needs a number, not {text!r}") from error
    if not 0 < hours < inf:
        raise PlanError(f"--hours {hours:g}: {ABOVE_0}")
    return hours


def show(asked: Asked) -> None:
    """The table, with what it rests on before it and what to type after it."""
    choice = _choice(asked)
    terminal = screen()
    for line in _before(asked):
        terminal.print(line, soft_wrap=True)
    stands = choice.as_it_stands if asked.recipe.auto != LEFT_TO_THE_PLAN else None
    header = [*WHAT, *_figures(choice.options[0], asked)]
    rows = [[_mark(option, choice), *_cells(option, asked)] for option in choice.options]
    if stands:
        rows.append(["as is", *_cells(stands, asked)])
    terminal.print(table(header, rows))
    for line in _after(asked, choice):
        terminal.print(line, soft_wrap=True)


def screen(width: int = WIDTH) -> Console:
    """A console; where no terminal is, as wide as the tables are."""
    terminal = console()
    return terminal if terminal.is_terminal else console(width=width)


def show_json(asked: Asked) -> None:
    """The same for other programs; what is not known is null."""
    choice = _choice(asked)
    figures = {key: value for key, value in asdict(choice).items() if key != "reason"}
    values = {
        "model": asked.recipe.name,
        "parameters": asked.shape.parameters,
        "nodes": asked.fleet.nodes,
        "machines": asdict(asked.machines),
        "data": None if asked.size is None else asdict(asked.size),
        "hours": asked.wish.hours or None,
        **figures,
        "reason": choice.reason,
        "settings": choice.chosen.values if choice.chosen else None,
    }
    print(json.dumps(finite(values), indent=1))


def _choice(asked: Asked) -> Choice:
    work = asked.size.work if asked.size else None
    return choose(asked.shape, asked.recipe, asked.machines, work, asked.wish.free)


def finite(value: Any) -> Any:
    """With null for every number that is none: for JSON."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _before(asked: Asked) -> Iterator[str]:
    its, at = asked.fleet, asked.machines
    what = f"{its.cards} x {' or '.join(asked.cards)}" if at.card else "no GPU"
    ram = f", {its.ram_gib:.0f} GiB RAM" if its.ram_gib else ""
    price = f"; {money(at.price_h, at.currency)} an hour" if at.price_h is not None else "; no price is known"
    yield f"{asked.recipe.name}: {asked.shape.parameters / 1e9:.3g} billion parameters in {asked.shape.layers} layers"
    yield f"machines: {its.nodes}, each {what}{ram} ({its.about}){price}"
    flops = dict.fromkeys(at.rates.each or [at.rates.flops or 0.0])
    each = " or ".join(f"{rate / 1e12:.3g}" for rate in flops)
    a_card = "a card" if at.card else "a CPU"
    computing = f"{each} TFLOP/s {a_card}, {at.flops_from}" if at.rates.flops else "computing not known"
    link = at.rates.bytes_per_s
    unknown = "network not known: [network] line_rate_gbps in cluster.toml, or fab check"
    yield f"rates: {computing}; {f'{link / 1e9:.3g} GB/s between ranks, {at.link_from}' if link else unknown}"
    for strategy, correction in at.corrections.by_strategy(asked.recipe.dtype, asked.recipe.tuning).items():
        yield f"seconds of {strategy} {correction.words}"
    yield from asked.notes
    if asked.lacks_dtype:
        yield f"{' or '.join(filter(lacks_bfloat16, asked.cards))} has no bfloat16: the same with --set dtype=float16"
    yield data_line(asked.size)


def data_line(size: Size | None) -> str:
    """How much there is to learn, and how that is known."""
    if size is None:
        return "data: none given; --data FILE adds time and money of a whole run"
    work = size.work
    return f"data: {size.records} records, {work.tokens} tokens in {work.rows} rows to learn from ({size.how})"


def _mark(option: Option, choice: Choice) -> str:
    return "take" if option == choice.chosen else "" if option.fits else "no"


def _cells(option: Option, asked: Asked) -> list[str]:
    has = "" if option.has_gib is None else f" of {option.has_gib:.1f}"
    lacks = f", {option.missing_gib:.1f} missing" if option.missing_gib else ""
    if option.streamed and asked.machines.ram_bytes == inf:
        lacks += f"; needs {option.ram_gib:.0f} GiB of RAM a node, not known"
    return [
        option.strategy,
        str(option.micro_batch),
        f"{option.checkpointed} of {option.layers}",
        option.refused or f"{option.needs_gib:.1f}{has}{lacks}",
        option.bound or NONE,
        *(figure if option.fits else NONE for figure in _figures(option, asked).values()),
    ]


def _figures(option: Option, asked: Asked) -> dict[str, str]:
    """Speed, time and money by their columns; of a run that fits."""
    hours, at = asked.wish.hours, asked.machines
    found = {"tokens/s": figure(option.tokens_per_s, ".0f"), "s a step": figure(option.step_s, ".1f")}
    found["time"] = duration(option.minutes)
    if hours:
        found[f"in {hours:g} h"] = _within(option, hours)
    if at.price_h is not None:
        found[at.currency or "price"] = figure(option.money, ".2f")
        found["a million tokens"] = figure(option.money_per_million, ".2f")
    return found


def _within(option: Option, hours: float) -> str:
    """What of the run, or how many tokens, the hours are enough for."""
    if option.minutes:
        return f"{min(1.0, 60 * hours / option.minutes):.0%}"
    return f"{option.tokens_per_s * 3600 * hours / 1e6:.1f} M tokens" if option.tokens_per_s else NONE


def _stages(option: Option, asked: Asked) -> str:
    """How the layers lie, first stage to last."""
    assert option.split
    split, cards = option.split, [card.card for card in asked.machines.mixed]
    lists = {"layers": split.layers, "of them again": split.checkpointed, "micro-batches held": split.held}
    each = "; ".join(f"{what} {', '.join(map(str, values))}" for what, values in lists.items())
    on = f" on {', '.join(cards[: split.stages])}" if cards else ""
    stages = f"{split.stages} stage{'s' * (split.stages > 1)}"
    copies = f"{option.copies} copies of {stages}" if option.copies > 1 else stages
    return f"{copies}{on}: {each}"


def _plain(value: Any) -> str:
    """As `--set` takes it, in one word."""
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list) else str(value)


def duration(minutes: float | None) -> str:
    """Minutes as a table shows them."""
    if minutes is None:
        return NONE
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def figure(value: float | None, how: str) -> str:
    """A number as a table shows it, or that it is not known."""
    return NONE if value is None else format(value, how)


def _sparing(asked: Asked, choice: Choice, chosen: Option) -> Iterator[str]:
    """What would spare a slow network, of the strategy to take or of another one that fits."""
    rates = asked.machines.rates.at_precision(asked.recipe.dtype, asked.machines.card is not None)
    for option in (chosen, *(each for each in choice.options if each.fits and each != chosen)):
        recipe = with_changes(asked.recipe, **option.values)
        tokens = micro_batch_tokens(recipe, asked.size.work.longest if asked.size else recipe.max_length)
        at = (asked.shape, asked.machines.ranks, tokens, rates)
        span = asked.size.work.span if asked.size else None
        corrected = asked.machines.corrections.of(option.strategy, recipe.dtype, recipe.tuning)
        factor = corrected.factor if corrected else 1.0
        taken = (chosen.step_s, chosen.strategy)
        if said := slow_link.advice(recipe, *at, span=span, factor=factor, taken=taken):
            yield said
            if option != chosen:
                return


def _after(asked: Asked, choice: Choice) -> Iterator[str]:
    now, chosen = choice.as_it_stands, choice.chosen
    left = asked.recipe.auto == LEFT_TO_THE_PLAN
    yield "computed, not measured; " + (
        "the recipe leaves all this to the plan of a start" if left else "as is: what the recipe says now"
    )
    for option in (option for option in choice.options if not option.refused):
        if option.split:
            yield f"{option.strategy}: {_stages(option, asked)}"
        if option.streamed:
            yield f"{option.strategy}: {option.streamed} of {option.layers} layers wait in RAM"
    if any(option.rests_on for option in choice.options):
        rests = next(option.rests_on for option in choice.options if option.rests_on)
        yield f"the weakest number of every row is {rests}; all times scale with it, and fab prove measures it"
    looked_at = {option.strategy for option in choice.options}
    if "strategy" in asked.wish.free and (missing := sorted(STRATEGIES.keys() - looked_at)):
        timed = asked.machines.rates.to_device_bytes_per_s is not None
        what = (
            "how much RAM a node has is not known"
            if timed
            else "how fast weights come from RAM to a card was not measured"
        )
        yield f"left out: {', '.join(missing)}: {what}: fab prove"
    yield f"{'take' if chosen else 'none'}: {choice.reason}"
    if chosen is None:
        return
    if not left and now.fits and now.tokens_per_s and chosen.tokens_per_s:
        yield f"that is {chosen.tokens_per_s / now.tokens_per_s:.1f} times what the recipe does as it is"
    yield from _sparing(asked, choice, chosen)
    dtype = ["dtype=float16"] if asked.lacks_dtype else []
    values = {key: value for key, value in chosen.values.items() if key not in asked.wish.named}
    settings = [*asked.wish.settings, *dtype, *(f"{key}={_plain(value)}" for key, value in values.items())]
    words = ["fab", "train", "--model", asked.recipe.name, *(["--data", asked.wish.data] if asked.wish.data else [])]
    yield f"next: {shlex.join([*words, *(word for setting in settings for word in ('--set', setting))])}"
