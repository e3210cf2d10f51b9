"""The figures of `fab plan --json`, every recipe on six fleets, against tests/golden/plans.json. A plan may move only
where a change means to move it: then `python -m tests.test_golden_plans` writes the file anew, and the diff shows what
moved.

Each recipe is tried on two of the fleets, so that all fleets have their turn; SPOTUNE_GOLDEN=all tries it on all six.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from inventory.settings import load_settings
from training.laptop import plan_options, plan_view
from training.laptop.plan_options import PlanWish
from training.models.names import load_recipe, recipe_names
from training.recipe.recipe import Recipe, flat

GOLDEN = Path(__file__).parent / "golden" / "plans.json"
CLUSTER = """\
name = "golden"
provider = "static"
[ssh]
key = "{folder}/key"
[[nodes]]
name = "n1"
address = "203.0.113.11"
gpus = {gpus}
"""
FLEETS = {
    "1 A10": (1, PlanWish(nodes=1, cards=("A10",), line_rate_gbps=16, price_per_hour=10)),
    "4 nodes of 1 A10": (1, PlanWish(nodes=4, cards=("A10",), line_rate_gbps=16, price_per_hour=10)),
    "2 nodes of 1 L20": (1, PlanWish(nodes=2, cards=("L20",), line_rate_gbps=32, price_per_hour=12)),
    "an A10 and an L20": (1, PlanWish(cards=("A10", "L20"), line_rate_gbps=16, price_per_hour=11)),
    "1 node of 8 H100": (8, PlanWish(nodes=1, cards=("H100",), line_rate_gbps=200, price_per_hour=400)),
    "4 slow nodes of 1 A10": (1, PlanWish(nodes=4, cards=("A10",), line_rate_gbps=0.5, price_per_hour=10)),
}
"""Cards of a node, and what is asked. A line rate that is said keeps the plan from asking the head."""
FIGURES = (
    *("micro_batch", "checkpointed", "needs_gib", "step_s", "tokens_per_s", "minutes", "money", "bound", "fits"),
    *("copies", "split"),
)
"""Of an option, in the order in which the file has them."""
DIGITS = 6
NAMES = recipe_names()
ALL = os.environ.get("SPOTUNE_GOLDEN") == "all"


def fleets_of(name: str) -> list[str]:
    """Those that a recipe is tried on here: two neighbours in turn."""
    known, first = [*FLEETS], NAMES.index(name)
    return known if ALL else [known[(first + k) % len(known)] for k in (0, 3)]


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A folder with data, without anything measured."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        place = Path(folder)
        (place / "key").touch()
        for gpus in (1, 8):
            (place / f"{gpus}.toml").write_text(CLUSTER.format(folder=place, gpus=gpus), encoding="utf-8")
        words = [
            {"prompt": "What is this? " * (9 + k % 7), "completion": "It is something else. " * (40 + 9 * (k % 11))}
            for k in range(128)
        ]
        (place / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in words), encoding="utf-8")
        yield place


def planned(place: Path, name: str, fleet: str) -> dict[str, Any]:
    """What `fab plan --json` says of a recipe on a fleet, without its sentences."""
    gpus, wish = FLEETS[fleet]
    wish = PlanWish(**{**vars(wish), "data": ("data.jsonl",)})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        plan_view.print_plan_json(
            plan_options.plan_question(load_settings(place / f"{gpus}.toml"), load_recipe(name), wish)
        )
    said = json.loads(printed.getvalue())
    four_bits = said["four_bits"]
    options = {one["strategy"]: [_rounded(one[key]) for key in FIGURES] for one in said["options"]}
    return {
        "parameters": said["parameters"],
        "steps": said["steps"],
        "chosen": said["chosen"] and said["chosen"]["strategy"],
        "settings": said["settings"],
        "four_bits_times": four_bits and _rounded(four_bits["times_as_fast"]),
        "options": options,
    }


def values_of(name: str) -> dict[str, Any]:
    """A recipe's keys that are not as a recipe has them by default."""
    default = flat(Recipe.model_construct().model_dump(mode="json", warnings=False))
    values = flat(load_recipe(name).model_dump(mode="json"))
    return {key: value for key, value in values.items() if value != default.get(key)}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def figures(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's figures by their names, as a difference is told."""
    options = {name: dict(zip(FIGURES, row, strict=True)) for name, row in plan["options"].items()}
    return flat({**plan, "options": options})


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with _place() as folder:
        yield folder


def test_every_recipe_is_in_the_file_on_every_fleet(golden):
    assert sorted(golden) == sorted(NAMES)
    assert {name for name in NAMES if [*golden[name]["plans"]] != [*FLEETS]} == set()
    assert {fleet for name in NAMES for fleet in fleets_of(name)} == {*FLEETS}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_and_its_plans_are_those_of_the_file(name, golden, place):
    assert values_of(name) == golden[name]["recipe"]
    moved = []
    for fleet in fleets_of(name):
        now, before = figures(planned(place, name, fleet)), figures(golden[name]["plans"][fleet])
        keys = [*before, *(key for key in now if key not in before)]
        moved += [
            f"{name}, {fleet}: {key} was {before.get(key)}, is {now.get(key)}"
            for key in keys
            if before.get(key) != now.get(key)
        ]
    assert not moved, "\n".join(moved)


def write() -> None:
    """The file, a line for each plan."""
    parts = []
    with _place() as place:
        for name in NAMES:
            plans = [f"{json.dumps(fleet)}: {json.dumps(planned(place, name, fleet))}" for fleet in FLEETS]
            said = f'"recipe": {json.dumps(values_of(name), ensure_ascii=False)}'
            parts.append(f"{json.dumps(name)}: {{\n{said},\n" + '"plans": {\n' + ",\n".join(plans) + "\n}}")
    GOLDEN.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "HF_HOME": f"{home}/hub"}
        write()
