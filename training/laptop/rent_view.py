"""What `fab plan --rent` prints: the machines worth renting, and what that rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from inventory.renting.types_on_offer import OnOffer
from inventory.shown import print_json
from inventory.terminal import console, table
from training.laptop.plan_view import BESIDES, at_worst, data_line, steps_of
from training.laptop.rent_options import CHEAPEST, FASTEST, Choices, best, words
from training.plan.frontier import RentOption, cheaper_in_numbers
from training.plan.options import AS_FAST
from training.text.counts import HOUR, NONE, bare, decimals, duration, figure, many, money, plain

WHAT = ("", "machines", "cards", "runs (micro_batch, recomputed layers)", "GiB a rank", "bound by")
WORDS = (WHAT[3], "bound by", "30 days: reclaimed")
"""The columns that may wrap."""
SPOT = (f"list, {HOUR}", f"spot, {HOUR}, 24 h", "30 days: reclaimed")
SHORT_MINUTES = 10
MADE_UP = "this machine's own cloud takes no money: prices and spot figures are made up"


def print_choices(choices: Choices) -> None:
    """The frontier, with what it rests on."""
    terminal = console()
    shape = choices.shape
    model = f"{plain(shape.parameters / 1e9)} billion parameters in {shape.layers} layers"
    fitting = f"it fits on {many(len(choices.ways), 'choice')} of machines"
    terminal.print(f"{choices.recipe.name}: {model}; {fitting}", soft_wrap=True)
    terminal.print(data_line(choices.size, choices.recipe), soft_wrap=True)
    table_rows = [_cells(choices, name, way) for name, way in _named(choices.rows)]
    if (now := choices.as_it_stands) is not None and now not in choices.rows:
        table_rows.append(_cells(choices, "as is", now))
    terminal.print(table(_header(choices), table_rows, WORDS))
    for line in _said(choices):
        terminal.print(line, soft_wrap=True)


def _named(shown: Sequence[RentOption]) -> Iterator[tuple[str, RentOption]]:
    """Each row by its number, and what is best about it."""
    cheapest, fastest = (best(shown, word) for word in (CHEAPEST, FASTEST))
    for number, way in enumerate(shown, start=1):
        words = [word for word, best in ((CHEAPEST, cheapest), (FASTEST, fastest)) if way is best]
        yield " ".join([str(number), *words]), way


def _header(choices: Choices) -> list[str]:
    currency = next((way.offered.machines.currency for way in choices.rows), "") or "price"
    of = "" if any(way.option.minutes is not None for way in choices.rows) else " a million tokens"
    figures = ["tokens/s", f"time{of}", f"{currency}{of}", f"{currency} {HOUR}"]
    return [*WHAT, *figures, *(SPOT if _has_spot(choices) else ())]


def _has_spot(choices: Choices) -> bool:
    return any(each.spot or each.advice for each in choices.offers.values())


def _cells(choices: Choices, name: str, way: RentOption) -> list[str]:
    option, at = way.option, way.offered.machines
    offer = choices.offers.get(way.offered.type_name)
    has = "" if option.has_gib is None else f" of {decimals(option.has_gib)}"
    cells = [
        name,
        f"{way.offered.nodes} x {way.offered.type_name}" + ("" if way.offered.in_stock else ", no stock"),
        f"{at.ranks} x {at.card}" if at.card else "none",
        f"{option.strategy} ({option.micro_batch}, {option.checkpointed} of {option.layers})",
        f"{decimals(option.needs_gib)}{has}",
        option.bound or NONE,
        figure(option.tokens_per_s, ".0f"),
        _time(way.seconds),
        money(way.money) or NONE,
        bare(at.price_h, per=HOUR) or NONE,
    ]
    return [*cells, *_spot_cells(offer, way.offered.nodes)] if _has_spot(choices) else cells


def _spot_cells(offer: OnOffer | None, nodes: int) -> list[str]:
    """Prices of all machines of the row, as those before them are."""
    if offer is None:
        return [NONE, NONE, NONE]
    low, high = (nodes * each for each in ((offer.spot.low, offer.spot.high) if offer.spot else (0.0, 0.0)))
    price = f"{bare(low, per=HOUR)} to {bare(high, per=HOUR)}" if offer.spot else NONE
    return [bare(nodes * offer.price.list, per=HOUR), price, offer.advice.interruption_text if offer.advice else NONE]


def _time(seconds: float | None) -> str:
    if seconds is None or seconds >= 60 * SHORT_MINUTES:
        return duration(None if seconds is None else seconds / 60)
    return f"{seconds / 60:.1f} min"


def _said(choices: Choices) -> Iterator[str]:
    yield from choices.notes
    if choices.settings.on_this_machine:
        yield MADE_UP
    weakest = dict.fromkeys(way.offered.machines.weakest for way in choices.rows if way.offered.machines.weakest)
    if weakest:
        yield f"computed, not measured; times of rows bound by computing scale with their card: {'; '.join(weakest)}"
    yield from _corrections(choices)
    yield from at_worst(choices.recipe, choices.size)
    yield BESIDES
    if choices.all_alike:
        yield from _in_numbers(choices)
    if (line := _against_now(choices)) is not None:
        yield line
    if choices.offers:
        yield "next: --take cheapest, fastest or a row's number writes it into cluster.toml; fab up --dry"


def _in_numbers(choices: Choices) -> Iterator[str]:
    """What more machines of a type buy."""
    priced = any(way.money is not None for way in choices.ways)
    expense = "money" if priced else "machine-hours"
    if pair := cheaper_in_numbers(choices.ways):
        fewer, more = pair
        yield (
            f"{words(more)} {'are cheaper' if priced else 'take fewer machine-hours'} than {fewer.offered.nodes} of "
            "them, because so few are too small for this model; apart from that, more machines save time, "
            f"not {expense}"
        )
    elif any(way.offered.nodes > 1 for way in choices.ways):
        yield f"more machines of one type save time, never {expense}"


def _corrections(choices: Choices) -> Iterator[str]:
    """By what runs on such machines the seconds of a row were corrected."""
    recipe, sentences = choices.recipe, dict[str, None]()
    for way in choices.rows:
        strategy, known = way.option.strategy, way.offered.machines.corrections
        if correction := known.of(strategy, recipe.dtype, recipe.tuning):
            sentences[f"seconds of {strategy} {correction.words}"] = None
    yield from sentences


def _against_now(choices: Choices) -> str | None:
    now, least = choices.as_it_stands, best(choices.rows, CHEAPEST)
    if now is None or least is None or not now.money or not least.money or now.money <= AS_FAST * least.money:
        return None
    return f"{words(least)}: {least.money / now.money:.0%} of what {words(now)} cost, which cluster.toml says now"


def print_choices_json(choices: Choices) -> None:
    """The same for other programs; what is not known is null."""
    values = {
        "model": choices.recipe.name,
        "data": None if choices.size is None else asdict(choices.size),
        "epochs": choices.recipe.epochs,
        "steps": steps_of(choices.size, choices.recipe),
        "rows": [_values(choices, way) for way in choices.rows],
        "as_it_stands": None if choices.as_it_stands is None else _values(choices, choices.as_it_stands),
        "made_up": choices.settings.on_this_machine,
        "notes": [*choices.notes, *at_worst(choices.recipe, choices.size)],
    }
    print_json(values)


def _values(choices: Choices, way: RentOption) -> dict[str, Any]:
    offer = choices.offers.get(way.offered.type_name)
    return {
        "type": way.offered.type_name,
        "nodes": way.offered.nodes,
        "in_stock": way.offered.in_stock,
        "zone": None if offer is None else offer.zone_id,
        "seconds": way.seconds,
        "money": way.money,
        "machines": asdict(way.offered.machines),
        "option": asdict(way.option),
        "settings": way.option.values,
        "list_price_h": None if offer is None else offer.price.list,
        "spot": None if offer is None or offer.spot is None else asdict(offer.spot),
        "advice": None if offer is None or offer.advice is None else asdict(offer.advice),
    }
