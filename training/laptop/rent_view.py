"""`fab plan --rent`: which machines to rent, and how many, before any is there: those that nothing beats in money and
in time. `--take` writes one of them into cluster.toml."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO

from inventory.cloud.errors import CloudError, RentError
from inventory.cloud.opening import open_cloud
from inventory.cloud.values import InstanceType
from inventory.cluster_file import Value, set_values
from inventory.nodes import static_nodes, users_ssh_config
from inventory.renting import members, tags
from inventory.renting.offers import OnOffer, on_offer
from inventory.settings import Settings, settings_path
from inventory.terminal import console, table
from training.cost.cards import SAME_MEMORY, card_bytes, lacks_bfloat16, rates_of, too_old
from training.cost.shape import ModelShape, PlanError
from training.cost.zero import part_misfit
from training.laptop import data_size, measurements
from training.laptop.data_size import Size
from training.laptop.machines import Fleet, card_of, fleet, machines, named_cards
from training.laptop.measurements import Measurements
from training.laptop.models.wanted import folder_faults
from training.laptop.plan_options import PlanWish, subject
from training.laptop.plan_view import BESIDES, at_worst, data_line, steps_of
from training.models.names import typed
from training.plan.frontier import Offered, RentOption, cheaper_in_numbers, has_rows, rows, ways
from training.plan.options import AS_FAST, Search, in_four_bits
from training.recipe.recipe import Recipe
from training.run.launch import LaunchError
from training.text.counts import HOUR, NONE, bare, decimals, duration, figure, finite, many, money, plain

COUNTS = (1, 2, 3, 4, 6, 8)
"""Of machines, besides the number in cluster.toml."""
CHEAPEST, FASTEST = "cheapest", "fastest"
NETWORK_IS = "--line-rate-gbps 16, or [network] line_rate_gbps in cluster.toml"
GIB = 2**30
SMALLER_GIB = {"A100": 40.0}
"""Cards that are sold whole with less memory too; others with less are slices."""


@dataclass(frozen=True)
class Choices:
    """What could be rented, and what of it is worth looking at."""

    settings: Settings
    wish: PlanWish
    recipe: Recipe
    shape: ModelShape
    size: Size | None
    ways: tuple[RentOption, ...]
    """All on which the model can be trained."""
    offers: Mapping[str, OnOffer] = field(default_factory=dict)
    """By the name of their type; none for machines that are listed."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[RentOption, ...]:
        return rows(self.ways)

    @property
    def all_alike(self) -> bool:
        """Whether more machines are more of the same: not where those listed have other cards or prices."""
        return len({(node.gpus, node.price_per_hour) for node in self.settings.nodes}) <= 1

    @property
    def as_it_stands(self) -> RentOption | None:
        """With the types and nodes of cluster.toml; None where the model does not fit there."""
        if not self.offers:
            return None
        own = self.settings.rental
        first = next((name for name in own.types if name in self.offers), "")
        return next((w for w in self.ways if (w.offered.type_name, w.offered.nodes) == (first, own.nodes)), None)


def rent_choices(settings: Settings, recipe: Recipe, wish: PlanWish) -> Choices:
    """What could be rented, as the cloud offers it now; of listed machines, how many of them to use. Raises PlanError,
    DataError, LaunchError."""
    if wish.hours:
        raise PlanError("--hours is for machines that are chosen; leave it out with --rent")
    if "," in wish.card:
        raise PlanError(f"--card {wish.card}: with --rent all machines are of one kind; name one")
    if wish.price_per_hour and not settings.is_listed:
        raise PlanError("--price-per-hour is for listed machines: with --rent the cloud says its prices")
    wish = replace(wish, card="".join(named_cards(wish.card)))
    shape, size = subject(recipe, wish)
    stands = settings.is_listed and not (wish.card or wish.line_rate_gbps)
    known = measurements.known(settings.name, static_nodes(settings, users_ssh_config())[0] if stands else None)
    offers: tuple[OnOffer, ...] = ()
    notes = known.notes
    if settings.is_listed:
        offered = list(_listed(settings, wish, known, shlex.quote(typed(recipe))))
        notes = (*notes, *fleet(settings, wish.nodes, wish.card, wish.price_per_hour).notes)
    else:
        try:
            all_offers, remarks = on_offer(open_cloud(settings), settings, lambda kind: _wanted(kind, recipe, wish))
        except (CloudError, RentError) as error:
            raise LaunchError(str(error)) from error
        offers = tuple(each for each in all_offers if _asked_card(each.machine, wish))
        if not offers:
            raise PlanError(f"--card {wish.card}: no machine with such cards is offered")
        offered, left_out = _offered(settings, wish, offers, known)
        faults = folder_faults(settings.models.names, sent_before=False)
        notes = (*notes, *remarks, *left_out, *data_size.too_small(settings, recipe, shape), *faults)
    rentable = ways(shape, recipe, offered, size.work if size else None)
    choices = Choices(
        settings, wish, recipe, shape, size, rentable, {each.machine.name: each for each in offers}, notes
    )
    if not choices.rows:
        raise PlanError("; ".join((_no_row(choices, offered), *choices.notes)))
    return replace(choices, notes=(*notes, *_of_no_known_speed(choices)))


def _no_row(choices: Choices, offered: Sequence[Offered]) -> str:
    recipe = choices.recipe
    if never := part_misfit(choices.shape, recipe):
        return f"{recipe.name}: {never}"
    least = min((each for each in offered if each.nodes > 1), key=lambda each: each.machines.ranks, default=None)
    if least is None or any(has_rows(each, recipe) for each in offered):
        work = choices.size.work if choices.size else None
        tried = (Search(choices.shape, recipe, each.machines, work) for each in offered if has_rows(each, recipe))
        hint = next(filter(None, map(in_four_bits, tried)), "")
        return f"{recipe.name} fits none of the machines there are{hint}"
    ranks = f"{many(least.nodes, 'machine')} have {many(least.machines.ranks, 'rank')}"  # two at least
    return (
        f"{ranks}, and a step only {many(recipe.global_batch, 'row')} for them "
        f"(global_batch = {recipe.global_batch}): take fewer machines, or a larger global_batch"
    )


def _of_no_known_speed(choices: Choices) -> Iterator[str]:
    """What would do and is in no row, as its times are not known while others' are."""
    shown = {way.offered.machines.card for way in choices.rows}
    untimed = [way for way in choices.rows if way.seconds is None and way.offered.machines.rates.flops is not None]
    least: dict[str, Offered] = {}
    alone = dict[str, None]()
    for way in sorted(choices.ways, key=lambda way: (not way.offered.in_stock, way.offered.machines.price_h or 0.0)):
        at = way.offered.machines
        kind = at.card or way.offered.type_name
        if at.rates.flops is None and at.card not in shown:
            least.setdefault(kind, way.offered)
        elif at.rates.flops is not None and way.seconds is None and way not in untimed:
            alone[kind] = None
    if least:
        each = (f"{kind}{_from(offered)}" for kind, offered in least.items())
        yield f"left out, as nobody knows how fast they are: {', '.join(each)}"
    why = f"nobody knows how fast their network is: {NETWORK_IS}"
    if untimed:
        yield f"without a time: {', '.join(map(words, untimed))}, as {why}"
        alone = {kind: None for kind in alone if kind not in shown}
    if alone:
        yield f"more than one machine each of {', '.join(alone)} left out, as {why}"


def _from(offered: Offered) -> str:
    price = offered.machines.price_h
    parts = [
        *([] if price is None else [f"from {money(price, offered.machines.currency, HOUR)}"]),
        *([] if offered.in_stock else ["no stock"]),
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _wanted(kind: InstanceType, recipe: Recipe, wish: PlanWish) -> bool:
    """Whole cards that are known, and can compute what the recipe asks for."""
    usual = card_bytes(kind.gpu_spec) if kind.gpu_spec else None
    if usual is None or too_old(kind.gpu_spec) or rates_of(kind.gpu_spec) is None:
        return False
    if recipe.dtype == "bfloat16" and lacks_bfloat16(kind.gpu_spec):
        return False
    least = SMALLER_GIB.get(kind.gpu_spec.split()[-1], usual / GIB) * (1 - SAME_MEMORY)
    sliced = 0 < kind.gpu_memory_gib < least
    return not sliced and _asked_card(kind, wish)


def _asked_card(kind: InstanceType, wish: PlanWish) -> bool:
    """Whether its cards are of the kind that is asked for; by its name, where the kind is not known here."""
    if (its := rates_of(wish.card)) is not None:
        return its is rates_of(kind.gpu_spec)
    return wish.card.lower() in (card_of(kind) or "").lower()


def _listed(settings: Settings, wish: PlanWish, known: Measurements, model: str) -> Iterator[Offered]:
    most = len(settings.nodes)
    if wish.nodes > most:
        raise PlanError(f"--nodes {wish.nodes}: {most} are listed")
    for count in [wish.nodes] if wish.nodes else range(1, most + 1):
        planned_fleet = _at_rate(fleet(settings, count, wish.card, wish.price_per_hour, model), wish)
        its = machines(settings, planned_fleet, not (wish.card or wish.line_rate_gbps), known, model)
        yield Offered("listed", count, its)


def _offered(
    settings: Settings, wish: PlanWish, offers: Sequence[OnOffer], known: Measurements
) -> tuple[list[Offered], list[str]]:
    offered, left_out = [], []
    counts = (wish.nodes,) if wish.nodes else sorted({*COUNTS, settings.rental.nodes})
    for each in offers:
        kind = each.machine
        rate = kind.line_rate_gbps or settings.network.line_rate_gbps or None
        one = Fleet(1, kind.gpus, card_of(kind), kind.memory_gib, rate, currency=each.price.currency)
        try:
            for count in counts:
                its = _at_rate(replace(one, nodes=count, price_h=count * each.price.trade), wish)
                offered.append(Offered(kind.name, count, machines(settings, its, False, known), each.in_stock))
        except LaunchError as error:
            left_out.append(f"{kind.name} is left out: {error}")
    return offered, left_out


def _at_rate(fleet: Fleet, wish: PlanWish) -> Fleet:
    return replace(fleet, line_rate_gbps=wish.line_rate_gbps) if wish.line_rate_gbps else fleet


def best(shown: Sequence[RentOption], which: str) -> RentOption | None:
    """The fastest of those in stock, or of those within 3 % of the least money the fastest; None where nobody knows
    their times, or what they cost."""
    in_stock = [way for way in shown if way.offered.in_stock]
    timed = [way for way in in_stock if way.seconds is not None]
    if which == FASTEST:
        return timed[-1] if timed else None
    paid = [(way.money, way) for way in timed if way.money is not None]
    least = min((money for money, _ in paid), default=0.0)
    return next((way for money, way in reversed(paid) if money <= AS_FAST * least), None)


def words(way: RentOption) -> str:
    """Machines as a sentence names them."""
    card = way.offered.machines.card
    return f"{way.offered.nodes} x {way.offered.type_name}{f' ({card})' if card else ''}"


def take(choices: Choices, which: str, out: TextIO | None = None) -> None:
    """Write one row's types and nodes into cluster.toml; says what changed, on `out`. Raises PlanError for what is no
    row that can be rented and for a data disk that is too small, SettingsError where the file cannot be changed."""
    way = _asked_for(choices, which)
    for line in data_size.too_small(choices.settings, choices.recipe, choices.shape):
        raise PlanError(f"--take {which}: {line}; set it, since prices are with the disk")
    own = choices.settings.rental
    offer = choices.offers[way.offered.type_name]
    values: dict[str, Value] = {"types": [offer.machine.name, *offer.also], "nodes": way.offered.nodes}
    path = settings_path()
    changed = set_values(path, own.table, values)
    for line in changed or (f"it says {words(way)} already",):
        print(f"{path}: {line}", file=out)
    existing = members.reachable(open_cloud(choices.settings).instances(tags=tags.of_cluster(choices.settings.name)))
    if existing:
        print(
            f"{members.so_many(len(existing))} stand already and stay as they are; fab down gives them back", file=out
        )
    print("next: fab up --dry", file=out)


def _asked_for(choices: Choices, which: str) -> RentOption:
    shown = choices.rows
    if not choices.offers:
        raise PlanError(f"--take {which}: the machines are listed, there is nothing to rent")
    names = f"{CHEAPEST}, {FASTEST} or 1 to {len(shown)}"
    if which in (CHEAPEST, FASTEST):
        way = best(shown, which)
        if way is None:
            unknown = f"nobody knows how fast they are; there is 1 to {len(shown)}"
            reason = unknown if any(w.offered.in_stock for w in shown) else "nothing is in stock"
            raise PlanError(f"--take {which}: {reason}")
        return way
    if not which.isdecimal() or not 1 <= int(which) <= len(shown):
        raise PlanError(f"--take {which}: there is {names}")
    way = shown[int(which) - 1]
    if not way.offered.in_stock:
        raise PlanError(f"--take {which}: {way.offered.type_name} is not in stock, fab up could not rent it")
    return way


# What `fab plan --rent` prints: the machines worth renting, and what that rests on.

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
            "them, because so few are too small for this model; apart from that, more machines save time, not {expense}"
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
    print(json.dumps(finite(values), indent=1))


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
