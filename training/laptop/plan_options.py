"""`fab plan`: what every strategy is computed from, and the command that starts the chosen one."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from inventory.settings import Settings
from training.cost.cards import lacks_bfloat16, too_old
from training.cost.shape import ModelShape, PlanError, known_shape
from training.laptop import data_size
from training.laptop.data_size import Size, size_of
from training.laptop.derived import counted, folder_faults
from training.laptop.machines import Fleet, fleet, machines
from training.laptop.preparing import measurements_of
from training.models.names import is_listed, typed
from training.plan.machines import PlannedMachines, with_network
from training.plan.notes import SETTING, mixture_notes
from training.plan.options import Choice, Search, choose, in_four_bits
from training.recipe.recipe import LEFT_TO_THE_PLAN, Recipe
from training.text.counts import many

ABOVE_0 = "it has to be above 0, and finite"


@dataclass(frozen=True)
class PlanWish:
    """The flags of `fab plan`; 0 and empty: as the cluster is."""

    data: tuple[str, ...] = ()
    nodes: int = 0
    hours: float = 0.0
    """That the machines are there."""
    cards: tuple[str, ...] = ()
    """As `named_cards` gives them: of all nodes, or of one each."""
    line_rate_gbps: float = 0.0
    price_per_hour: float = 0.0
    """Of one node."""
    settings: tuple[str, ...] = ()
    """What the recipe was changed by, as `--set` takes it."""
    skip_bad: bool = False
    """Whether records of the data that cannot be used are left out."""

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
class PlanQuestion:
    """What options are wanted for, and what is known of it."""

    wish: PlanWish
    recipe: Recipe
    shape: ModelShape
    fleet: Fleet
    machines: PlannedMachines
    size: Size | None
    notes: tuple[str, ...] = ()
    """What could not be found out."""

    @property
    def lacks_dtype(self) -> bool:
        """Whether a card has nothing for the recipe's bfloat16."""
        return self.recipe.dtype == "bfloat16" and any(map(lacks_bfloat16, self.cards))

    @property
    def each_node(self) -> str:
        """What cards each has, for people."""
        return f"{self.fleet.cards_text} x {' or '.join(self.cards)}" if self.machines.card else "no GPU"

    @property
    def cards(self) -> list[str]:
        """Their kinds; none where ranks compute on the CPU."""
        kinds = [each.card for each in self.machines.mixed] or [self.machines.card or ""]
        return [kind for kind in dict.fromkeys(kinds) if kind]


def plan_question(settings: Settings, recipe: Recipe, wish: PlanWish) -> PlanQuestion:
    """Gather what the options are made from. Raises PlanError for flags and models that cannot be planned, DataError,
    and LaunchError where nothing is known of the machines."""
    shape, size = subject(recipe, wish)
    planned_fleet = fleet(settings, wish.nodes, wish.cards, wish.price_per_hour, shlex.quote(typed(recipe)))
    if wish.line_rate_gbps:
        planned_fleet = replace(planned_fleet, line_rate_gbps=wish.line_rate_gbps, own=False)
    as_it_is = planned_fleet.own or not (wish.cards or wish.line_rate_gbps)
    measured = measurements_of(settings.name, planned_fleet.head if as_it_is else None)
    at = with_network(machines(settings, planned_fleet, as_it_is, measured, shlex.quote(typed(recipe))))
    faults = folder_faults(settings.models.names, sent_before=planned_fleet.head is not None)
    notes = (*planned_fleet.notes, *measured.notes, *data_size.too_small(settings, recipe, shape), *faults)
    notes += mixture_notes(shape)
    question = PlanQuestion(wish, recipe, shape, planned_fleet, at, size, notes)
    if old := next(filter(too_old, question.cards), ""):
        raise PlanError(f"torch has no kernels for {old}: take cards from T4 on")
    return question


def subject(recipe: Recipe, wish: PlanWish) -> tuple[ModelShape, Size | None]:
    """The model to be planned, and how much it is to learn. Raises PlanError for flags and models that cannot be
    planned, DataError."""
    if wish.nodes < 0:
        raise PlanError(f"--nodes {wish.nodes}: it has to be above 0")
    shape = _shape(recipe)
    if shape is None:
        raise PlanError(
            f"the shape of {recipe.base_model} is not known here: no recipe that is shipped names it; "
            "fab train --dry plans with the model on the head"
        )
    return shape, size_of(wish.data, recipe, wish.skip_bad)


def _shape(recipe: Recipe) -> ModelShape | None:
    base = recipe.base_model
    derived = recipe.name == base.own_name and not is_listed(recipe)  # no file was edited to say so
    return known_shape(base) or (counted(base) if base.folder or derived else None)


def amount(flag: str, text: str) -> float:
    """What a flag such as `--hours` says; 0 where it says nothing. Raises PlanError for what is no amount."""
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError as error:
        raise PlanError(f"{flag} needs a number, not {text!r}") from error
    if not 0 < value < inf:
        raise PlanError(f"{flag} {value:g}: {ABOVE_0}")
    return value


MORE = (2, 4, 8)
"""Numbers of nodes that are tried where nothing fits."""


def start(question: PlanQuestion) -> str:
    """The start that decides the same. It is left to it: what is pinned cannot be laid out anew when a node is gone."""
    its, wish = question.fleet, question.wish
    if not its.own:
        return (
            f"a what-if, so no start is proposed: {many(its.nodes, 'node')}, each {question.each_node}; fab train "
            "decides anew for the cluster's own machines"
        )
    left = [f"{key}=auto" for key in wish.free if key not in question.recipe.auto]
    settings = [*wish.settings, *(["dtype=float16"] if question.lacks_dtype else []), *left]
    words = ["fab", "train", "--model", typed(question.recipe), *_data(wish)]
    return f"next: {shlex.join([*words, *_repeated('--set', settings)])}"


def where_nothing_fits(question: PlanQuestion, choice: Choice) -> str | None:
    """What would fit; None where the recipe itself is what no machine can run."""
    if all(option.refused for option in choice.options):
        return None
    work = question.size.work if question.size else None
    if in_four_bits(Search(question.shape, question.recipe, question.machines, work, question.wish.free)):
        return f"next: {in_four_bits_too(question)}"
    each = question.machines.ranks_per_node
    counts = () if question.machines.mixed else (n for n in MORE if n > question.fleet.nodes)
    for count in counts:
        more = replace(question.machines, ranks=count * each)
        if (
            more.ranks <= question.recipe.global_batch
            and choose(question.shape, question.recipe, more, work, question.wish.free).chosen
        ):
            return f"next: {many(count, 'such node')} would do: {_plan(question, question.wish.settings, count)}"
    return "next: a larger card, with --card"


def in_four_bits_too(question: PlanQuestion) -> str:
    """The same plan with the frozen layers rounded."""
    return _plan(question, [*question.wish.settings, SETTING])


def _plan(question: PlanQuestion, settings: Iterable[str], nodes: int = 0) -> str:
    """This plan with other values."""
    wish = question.wish
    flags: dict[str, str | float] = {
        "--nodes": nodes or wish.nodes,
        "--hours": wish.hours,
        "--card": ",".join(wish.cards),
        "--line-rate-gbps": wish.line_rate_gbps,
        "--price-per-hour": wish.price_per_hour,
    }
    arguments = [word for flag, value in flags.items() if value for word in (flag, _text(value))]
    words = ["fab", "plan", "--model", typed(question.recipe), *_data(wish)]
    return shlex.join([*words, *arguments, *_repeated("--set", settings)])


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _data(wish: PlanWish) -> list[str]:
    return [*_repeated("--data", wish.data), *(["--skip-bad"] if wish.skip_bad else [])]


def _repeated(flag: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]
