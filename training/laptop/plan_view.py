"""What `fab plan` prints: every strategy on the machines, what that rests on, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from inventory.shown import print_json
from inventory.terminal import console, table
from training.cost.cards import lacks_bfloat16
from training.laptop import plan_options
from training.laptop.data_size import Size
from training.laptop.plan_options import PlanQuestion
from training.plan.data_checks import enough_records
from training.plan.machines import NETWORK, TAKEN
from training.plan.notes import SETTING, Rounded, four_bits_faster
from training.plan.options import Choice, Option, Search, choose
from training.recipe.model_types import once_a_sample
from training.recipe.recipe import LEFT_TO_THE_PLAN, Recipe
from training.recipe.tables import DPO
from training.text.counts import HOUR, NONE, decimals, duration, figure, many, money, plain


def advice(question: PlanQuestion, choice: Choice) -> Iterator[str]:
    """A sentence each."""
    if choice.chosen is None:
        return
    if faster := _four_bits(question, choice):
        yield faster.sentence(plan_options.in_four_bits_too(question))


def four_bits_values(question: PlanQuestion, choice: Choice) -> dict[str, Any] | None:
    """For programs: what four bits a weight would win; None where they would not much."""
    if (faster := _four_bits(question, choice)) is None:
        return None
    how = {"set": SETTING, "command": plan_options.in_four_bits_too(question)}
    return {**how, "times_as_fast": faster.times, "option": asdict(faster.option)}


def _four_bits(question: PlanQuestion, choice: Choice) -> Rounded | None:
    """Where they would be much faster, and nobody has said what the frozen layers are kept in."""
    work = question.size.work if question.size else None
    search = Search(question.shape, question.recipe, question.machines, work, question.wish.free)
    return None if "base_precision" in question.wish.named else four_bits_faster(search, choice.chosen)


WHAT = ("", "strategy", "micro_batch", "recomputed layers", "GiB a rank", "bound by")
WORDS = ("GiB a rank", "bound by")
"""The columns that may wrap: the first says too why a strategy is refused."""
BESIDES = (
    "time and cost cover the run itself, including model loading and the first step; booting, the base deploy and "
    "the model download come on top, on every machine"
)
LONGER = 1.1
"""Than the mean a row has to be for padding to count."""


def print_plan(question: PlanQuestion) -> bool:
    """The table, with what it rests on before it and what to type after it; whether anything fits."""
    choice = _choice(question)
    terminal = console()
    for line in _before(question):
        terminal.print(line, soft_wrap=True)
    stands = _as_it_stands(question, choice)
    header = [*WHAT, *_figures(choice.options[0], question)]
    rows = [[_mark(option, choice), *_cells(option, question)] for option in choice.options]
    if stands:
        rows.append(["as is", *_cells(stands, question)])
    terminal.print(table(header, rows, WORDS))
    for line in _after(question, choice):
        terminal.print(line, soft_wrap=True)
    return choice.chosen is not None


def _as_it_stands(question: PlanQuestion, choice: Choice) -> Option | None:
    """None where the recipe leaves something to the plan: nobody would run it with that as it is."""
    return None if question.recipe.auto else choice.as_it_stands


def print_plan_json(question: PlanQuestion) -> bool:
    """The same for other programs; what is not known is null."""
    choice = _choice(question)
    stands = _as_it_stands(question, choice)
    values = {
        "model": question.recipe.name,
        "parameters": question.shape.parameters,
        "nodes": question.fleet.nodes,
        "machines": asdict(question.machines),
        "data": None if question.size is None else asdict(question.size),
        "epochs": question.recipe.epochs,
        "steps": steps_of(question.size, question.recipe),
        "hours": question.wish.hours or None,
        "options": [_values(option) for option in choice.options],
        "as_it_stands": _values(stands) if stands else None,
        "chosen": _values(choice.chosen) if choice.chosen else None,
        "reason": choice.reason,
        "settings": choice.chosen.values if choice.chosen else None,
        "four_bits": four_bits_values(question, choice),
        "notes": [
            *question.notes,
            *_taken(question),
            *_uncounted(question),
            *at_worst(question.recipe, question.size),
            *_too_little(question),
        ],
    }
    print_json(values)
    return choice.chosen is not None


def _values(option: Option) -> dict[str, Any]:
    return {**asdict(option), "fits": option.fits}


def _choice(question: PlanQuestion) -> Choice:
    work = question.size.work if question.size else None
    return choose(question.shape, question.recipe, question.machines, work, question.wish.free)


def _before(question: PlanQuestion) -> Iterator[str]:
    its, at = question.fleet, question.machines
    ram = f", {its.ram_gib:.0f} GiB RAM" if its.ram_gib else ""
    billions = plain(question.shape.parameters / 1e9)
    yield f"{question.recipe.name}: {billions} billion parameters in {many(question.shape.layers, 'layer')}"
    yield f"machines: {its.nodes}, each {question.each_node}{ram} ({its.about}); {_price(question)}"
    flops = dict.fromkeys(at.rates.each or [at.rates.flops or 0.0])
    each = " or ".join(plain(rate / 1e12) for rate in flops)
    a_card = "a card" if at.card else "a CPU"
    computing = f"{each} TFLOP/s {a_card}, {at.flops_from}" if at.rates.flops else "computing not known"
    link = at.rates.bytes_per_s
    unknown = "network not known: --line-rate-gbps 16, [network] line_rate_gbps in cluster.toml, or fab check"
    between = f"{plain(link / 1e9)} GB/s between ranks, {at.link_from}" if link else unknown
    yield f"rates: {computing}" + (f"; {between}" if at.ranks > 1 else "")
    for strategy, correction in at.corrections.by_strategy(question.recipe.dtype, question.recipe.tuning).items():
        yield f"seconds of {strategy} {correction.words}"
    yield from question.notes
    if question.lacks_dtype:
        kinds = " or ".join(filter(lacks_bfloat16, question.cards))
        yield f"{kinds} has no bfloat16: the table is as of float16, and a start needs --set dtype=float16"
    yield data_line(question.size, question.recipe)
    yield from _too_little(question)


def _too_little(question: PlanQuestion) -> Iterator[str]:
    """What the table of a start would say of so few records."""
    if size := question.size:
        check = enough_records(question.recipe, size.records, size.work.rows, question.recipe.goal == DPO)
        if check.severity != "ok":
            yield check.sentence


def _price(question: PlanQuestion) -> str:
    """What the machines cost an hour, and in which currency; or that nobody said."""
    at = question.machines
    if at.price_h is None:
        return "no price is known"
    unsaid = "in the currency of --price-per-hour" if question.wish.price_per_hour else "no currency is given"
    return money(at.price_h, at.currency, HOUR) + ("" if at.currency else f" ({unsaid})")


def data_line(size: Size | None, recipe: Recipe) -> str:
    """How much there is to learn, how that is known, and in how many steps."""
    steps = steps_of(size, recipe)
    if size is None:
        what = "--data FILE adds time and money of a whole run" if steps is None else many(steps, "step")
        return f"data: none given; {what}"
    work = size.work
    learned = (
        f"data: {many(size.records, 'record')}, {many(work.tokens, 'token')} in {many(work.rows, 'row')} to learn from"
    )
    times = "" if recipe.epochs is None else f"x {recipe.epochs:g} epoch{'s' * (recipe.epochs != 1)} = "
    return f"{learned} ({size.how}), {times}{many(steps or 0, 'step')}"


def steps_of(size: Size | None, recipe: Recipe) -> int | None:
    """Of the whole run; None where it depends on data that are not given."""
    return recipe.steps if size is None else recipe.total_steps(size.work.rows)


def at_worst(recipe: Recipe, size: Size | None) -> Iterator[str]:
    """What padded rows make of all times, which are reckoned as if each were the longest."""
    mean = size.work.tokens / size.records if size else 0.0
    if recipe.batching != "padded" or (size and size.work.longest <= LONGER * mean):
        return
    longest = f"the longest: {size.work.longest} tokens, {mean:.0f} on average" if size else "max_length"
    yield f"padded rows: speed, time and money are at worst, as if every row were as long as {longest}"


def _mark(option: Option, choice: Choice) -> str:
    return "take" if option == choice.chosen else "" if option.fits else "no"


def _cells(option: Option, question: PlanQuestion) -> list[str]:
    has = "" if option.has_gib is None else f" of {decimals(option.has_gib)}"
    lacks = f", {decimals(option.missing_gib)} missing" if option.missing_gib else ""
    return [
        option.strategy,
        str(option.micro_batch),
        f"{option.checkpointed} of {option.layers}",
        option.refused or f"{decimals(option.needs_gib)}{has}{lacks}",
        option.bound or NONE,
        *(figure if option.fits else NONE for figure in _figures(option, question).values()),
    ]


def _figures(option: Option, question: PlanQuestion) -> dict[str, str]:
    """Speed, time and money by their columns; of a run that fits."""
    hours, at = question.wish.hours, question.machines
    figures = {"tokens/s": figure(option.tokens_per_s, ".0f"), "s a step": figure(option.step_s, ".1f")}
    figures["time"] = duration(option.minutes)
    if hours:
        figures[f"in {hours:g} h"] = _within(option, hours)
    if at.price_h is not None:
        currency = at.currency or "price"
        figures[currency] = money(option.money) or NONE
        figures[f"{currency} a million tokens"] = money(option.money_per_million) or NONE
    return figures


def _within(option: Option, hours: float) -> str:
    """What of the run, or how many tokens, the hours are enough for."""
    if option.minutes:
        return f"{min(1.0, 60 * hours / option.minutes):.0%}"
    return f"{decimals(option.tokens_per_s * 3600 * hours / 1e6)} M tokens" if option.tokens_per_s else NONE


def _stages(option: Option, question: PlanQuestion) -> str:
    """How the layers lie, first stage to last."""
    assert option.split
    split, cards = option.split, [card.card for card in question.machines.mixed]
    lists = {"layers": split.layers, "of them recomputed": split.checkpointed, "micro-batches held": split.held}
    each = "; ".join(f"{what} {', '.join(map(str, values))}" for what, values in lists.items())
    on = f" on {', '.join(cards[: split.stages])}" if cards else ""
    stages = f"{split.stages} stage{'s' * (split.stages > 1)}"
    copies = f"{option.copies} copies of {stages}" if option.copies > 1 else stages
    return f"{copies}{on}: {each}"


def _taken(question: PlanQuestion) -> Iterator[str]:
    if question.machines.link_from == TAKEN:
        yield f"all seconds, tokens/s and money are computed {NETWORK}"


def _uncounted(question: PlanQuestion) -> Iterator[str]:
    if note := once_a_sample(question.shape.kind):
        yield note


def _after(question: PlanQuestion, choice: Choice) -> Iterator[str]:
    now, chosen = choice.as_it_stands, choice.chosen
    left = question.recipe.auto
    what = "all this" if left == LEFT_TO_THE_PLAN else " and ".join(left)
    yield "computed, not measured; " + (
        f"the recipe leaves {what} to the plan of a start" if left else "as is: what the recipe says now"
    )
    yield from _figures_rest_on(question, choice)
    yield from _taken(question)
    yield from _uncounted(question)
    yield from at_worst(question.recipe, question.size)
    if chosen is not None and chosen.tokens_per_s and question.machines.price_h is not None:
        yield BESIDES
    yield f"{'take' if chosen else 'none'}: {choice.reason}"
    if chosen is None:
        if suggestion := plan_options.where_nothing_fits(question, choice):
            yield suggestion
        return
    if not left and now.fits and now.tokens_per_s and chosen.tokens_per_s:
        yield f"that is {chosen.tokens_per_s / now.tokens_per_s:.1f} times what the recipe does as it is"
    yield from advice(question, choice)
    yield plan_options.start(question)


def _figures_rest_on(question: PlanQuestion, choice: Choice) -> Iterator[str]:
    """How the layers of what fits lie, and the weakest number behind its times."""
    fitting = [option for option in choice.options if option.fits]
    for option in fitting:
        if option.split:
            yield f"{option.strategy}: {_stages(option, question)}"
    if rests := next((option.rests_on for option in fitting if option.rests_on), ""):
        weakest = "the weakest numbers are" if "; " in rests else "the weakest number is"
        yield f"{weakest} {rests}; times of rows bound by computing scale with it, and fab prove measures it"
