"""Whether a call is one that the vendor describes: no parameter that its action does not know, none of another type,
none missing that must be there.

parameters.json has a line for each action that is served, made of the vendor's description of the API: `Amount:i` is a
whole number (f: a decimal, b: a truth value), `RegionId!` must be there, `DataDisk.N.Size` is of each of a list, and
`Permissions.N.*` is not described further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from inventory.localcloud.ecs.actions import ApiError

FILE = Path(__file__).with_name("parameters.json")
WORD = re.compile(r"(?P<name>[\w.*]+)(?P<needed>!?)(:(?P<kind>[ifb]))?")
TRUTH = ("true", "false")
REGION = "RegionId"
"""The vendor's clients send it with every call."""


def _truth(value: str) -> None:
    if value.lower() not in TRUTH:
        raise ValueError(value)


READ: Mapping[str, Callable[[str], object]] = {"i": int, "f": float, "b": _truth}


@dataclass(frozen=True)
class Described:
    """The parameters of an action: their kinds, and which must be there."""

    kinds: Mapping[str, str]
    needed: tuple[str, ...]


@cache
def described() -> dict[str, dict[str, Described]]:
    """By version and action."""
    told = json.loads(FILE.read_text(encoding="utf-8"))
    return {version: {name: _described(line) for name, line in actions.items()} for version, actions in told.items()}


def _described(line: str) -> Described:
    words = [match for word in line.split() if (match := WORD.fullmatch(word))]
    return Described(
        {word["name"]: word["kind"] or "" for word in words}, tuple(word["name"] for word in words if word["needed"])
    )


def check(version: str, action: str, flat: Mapping[str, str]) -> None:
    """Raises the API's refusal of a call that is not as its action is described; an unknown action is not looked at."""
    if (known := described().get(version, {}).get(action)) is None:
        return
    general = {key: re.sub(r"\.\d+(?=\.|$)", ".N", key) for key in flat}
    for key, name in general.items():
        if key == REGION:
            continue
        kind = known.kinds.get(key, known.kinds.get(name))
        if kind is None and f"{name.rpartition('.')[0]}.*" not in known.kinds:
            raise ApiError(400, "UnsupportedParameter", f"{action} knows no parameter {key}.")
        try:
            if flat[key]:
                READ.get(kind or "", str)(flat[key])
        except ValueError:
            raise ApiError(400, f"InvalidParameter.{key}", f"The specified parameter {key} is not valid.") from None
    for name in known.needed:
        listed, _, part = name.partition(".N.")  # of each of a list: where there is one
        entries = {key.rpartition(".")[0] for key in flat if part and key.startswith(f"{listed}.")}
        missing = any(f"{entry}.{part}" not in flat for entry in entries) if part else name not in general.values()
        if missing:
            told = f"The input parameter {name} that is mandatory for processing this request is not supplied."
            raise ApiError(400, f"MissingParameter.{name}", told)
