"""`fab plan --rent`: which machines to rent, and how many, before any is there: those that nothing beats in money and
in time. `--take` writes one of them into cluster.toml."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inventory.cloud.errors import CloudError, RentError
from inventory.cloud.opening import open_cloud
from inventory.cloud.values import InstanceType
from inventory.cluster_file import Value, set_values
from inventory.nodes import static_nodes
from inventory.renting import members, tags
from inventory.renting.types_on_offer import OnOffer, on_offer
from inventory.settings import Settings, settings_path
from training.cost.cards import lacks_bfloat16, rates_of, too_old
from training.cost.shape import ModelShape, PlanError
from training.cost.zero import part_misfit
from training.laptop import data_size, preparing
from training.laptop.data_size import Size
from training.laptop.derived import folder_faults
from training.laptop.machines import Fleet, card_of, fleet, machines
from training.laptop.plan_options import PlanWish, subject
from training.laptop.preparing import Measurements
from training.models.names import typed
from training.plan.frontier import Offered, RentOption, has_rows, rows, ways
from training.plan.notes import mixture_notes
from training.plan.options import AS_FAST, Search, in_four_bits
from training.recipe.recipe import Recipe
from training.run.launch import LaunchError
from training.text.counts import HOUR, many, money

COUNTS = (1, 2, 3, 4, 6, 8)
"""Of machines, besides the number in cluster.toml."""
CHEAPEST, FASTEST = "cheapest", "fastest"
NETWORK_IS = "--line-rate-gbps 16, or [network] line_rate_gbps in cluster.toml"


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
    if len(wish.cards) > 1:
        raise PlanError(f"--card {','.join(wish.cards)}: with --rent all machines are of one kind; name one")
    if wish.price_per_hour and not settings.is_listed:
        raise PlanError("--price-per-hour is for listed machines: with --rent the cloud says its prices")
    shape, size = subject(recipe, wish)
    stands = settings.is_listed and not (wish.cards or wish.line_rate_gbps)
    known = preparing.measurements_of(settings.name, static_nodes(settings)[0] if stands else None)
    offers: tuple[OnOffer, ...] = ()
    notes = (*mixture_notes(shape), *known.notes)
    if settings.is_listed:
        offered = list(_listed(settings, wish, known, shlex.quote(typed(recipe))))
        notes = (*notes, *fleet(settings, wish.nodes, wish.cards, wish.price_per_hour).notes)
    else:
        try:
            all_offers, remarks = on_offer(open_cloud(settings), settings, lambda kind: _wanted(kind, recipe, wish))
        except (CloudError, RentError) as error:
            raise LaunchError(str(error)) from error
        offers = tuple(each for each in all_offers if _asked_card(each.machine, wish))
        if not offers:
            raise PlanError(f"--card {''.join(wish.cards)}: no machine with such cards is offered")
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
    """Cards that are known, and can compute what the recipe asks for."""
    if too_old(kind.gpu_spec) or rates_of(kind.gpu_spec) is None:
        return False
    if recipe.dtype == "bfloat16" and lacks_bfloat16(kind.gpu_spec):
        return False
    return _asked_card(kind, wish)


def _asked_card(kind: InstanceType, wish: PlanWish) -> bool:
    """Whether its cards are of the kind that is asked for; by its name, where the kind is not known here."""
    card = "".join(wish.cards)
    if (its := rates_of(card)) is not None:
        return its is rates_of(kind.gpu_spec)
    return card.lower() in (card_of(kind) or "").lower()


def _listed(settings: Settings, wish: PlanWish, known: Measurements, model: str) -> Iterator[Offered]:
    most = len(settings.nodes)
    if wish.nodes > most:
        raise PlanError(f"--nodes {wish.nodes}: {most} are listed")
    for count in [wish.nodes] if wish.nodes else range(1, most + 1):
        planned_fleet = _at_rate(fleet(settings, count, wish.cards, wish.price_per_hour, model), wish)
        its = machines(settings, planned_fleet, not (wish.cards or wish.line_rate_gbps), known, model)
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


def take(choices: Choices, which: str) -> None:
    """Write one row's types and nodes into cluster.toml; says what changed. Raises PlanError for what is no
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
        print(f"{path}: {line}")
    existing = members.reachable(open_cloud(choices.settings).instances(tags=tags.of_cluster(choices.settings.name)))
    if existing:
        print(f"{members.so_many(len(existing))} stand already and stay as they are; fab down gives them back")
    print("next: fab up --dry")


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
