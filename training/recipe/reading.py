"""Recipes read from TOML with the keys that a command overrides, and checked: each key, and whether the strategy can
run it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from training.recipe.recipe import LEANEST, LEFT_TO_THE_PLAN, Recipe, RecipeError
from training.recipe.strategy_rules import PARTITIONED, needs
from training.recipe.tables import DPO, DPO_LR_DIV, NF4, Table
from training.text import problems
from training.text.problems import EncodingError, expected, text_of


def parse_recipe(text: str, overrides: Mapping[str, str] | None, source: str) -> Recipe:
    """A recipe's text, with `overrides`; `source` names it in what is wrong."""
    return _checked(_overridden(tomllib.loads(text), overrides or {}), source)


def read_recipe(path: Path, overrides: Mapping[str, str] | None = None, source: str = "") -> Recipe:
    """A recipe's file, with `overrides`; `source` names it in what is wrong."""
    return _checked(_overridden(read_toml(path), overrides or {}), source or str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """A file's values, unchecked. RecipeError where it cannot be read."""
    try:
        return tomllib.loads(text_of(path))
    except EncodingError as error:
        raise RecipeError(str(error)) from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: {error}") from error


def with_changes(recipe: Recipe, **changes: object) -> Recipe:
    """The recipe with some keys changed, of tables by their dotted names or as a whole, checked again; what was left to
    the plan and is said now is so no more. RecipeError where they do not go together."""
    values = recipe.model_dump()
    values["auto"] = tuple(key for key in recipe.auto if key not in changes)
    for dotted, value in changes.items():
        name, _, key = dotted.partition(".")
        values[name] = {**values[name], key: value} if key else value
    return _checked(values, recipe.name)


def _checked(values: dict[str, Any], source: str) -> Recipe:
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        lines = [
            _sentence(".".join(map(str, e["loc"])), expected(e) + (f", not {e['input']!r}" if _to_be_shown(e) else ""))
            for e in error.errors()
        ]
        raise RecipeError("\n".join(f"{source}: {line}" for line in lines)) from error
    if "strategy" not in recipe.auto and (reason := needs(recipe, gpu=True)):
        raise RecipeError(f"{source}: {reason}")
    return recipe


def _to_be_shown(problem: ErrorDetails) -> bool:
    """Whether a value is what is wrong, and the message does not have it."""
    of_the_key = problem["type"] in {"extra_forbidden", "missing", "value_error"}
    return not of_the_key and isinstance(problem["input"], str | int | float)


def _sentence(key: str, message: str) -> str:
    if message == "Extra inputs are not permitted":
        near = problems.near(key, known_keys())
        message = f"no such key; did you mean {near}?" if near else "no such key"
    return f"{key}: {message}" if key else message


def known_keys() -> list[str]:
    """All keys of a recipe, those of tables dotted."""
    tables = {
        key: type(field.default) for key, field in Recipe.model_fields.items() if isinstance(field.default, Table)
    }
    inner = [f"{name}.{key}" for name, table in tables.items() for key in table.model_fields]
    return [*(key for key in Recipe.model_fields if key not in tables), *inner]


def _overridden(values: dict[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    # steps and epochs exclude each other: asking for one takes the recipe's other one away.
    for override, other in (("steps", "epochs"), ("epochs", "steps")):
        if override in overrides and other not in overrides:
            values.pop(other, None)
    # Four bits need whole weights on each rank: a strategy that divides them, and that nobody asks for here, gives way.
    divides = values.get("strategy", LEANEST) in PARTITIONED
    if overrides.get("base_precision") == NF4 and "strategy" not in overrides and divides:
        values["strategy"] = "auto"
    if lr := _slower_lr(values, overrides):
        values["optimizer"]["lr"] = lr
    if "auto" in overrides:
        raise RecipeError(f"auto: say which key the plan decides, as in {LEFT_TO_THE_PLAN[0]}=auto")
    for dotted, text in overrides.items():
        *tables, key = dotted.split(".")
        table = values
        for name in tables:
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                raise RecipeError(f"{dotted}: {name} is a value, not a table")
            table = inner
        table[key] = _value(text)
    return values


def _value(text: str) -> Any:
    """A TOML value where the text is one, else the text itself: `dtype=float32` needs no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # no TOML, or a number of thousands of digits
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _slower_lr(values: Mapping[str, Any], overrides: Mapping[str, str]) -> float | None:
    """The learning rate of goal dpo where `overrides` ask for that, and for no rate, of a recipe that names one for
    goal sft; None elsewhere."""
    named = values.get("optimizer", {}).get("lr")
    switches_to_dpo = overrides.get("goal") == DPO and values.get("goal") != DPO and "optimizer.lr" not in overrides
    return float(f"{named / DPO_LR_DIV:.6g}") if switches_to_dpo and isinstance(named, int | float) else None
