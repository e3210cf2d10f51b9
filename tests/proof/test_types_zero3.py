"""Under ZeRO-3, on one rank and on two, every type that is admitted learns what one plain rank does."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support.models_page import shown  # noqa: E402
from tests.support.ranks import together  # noqa: E402
from tests.support.small_models import TRIED  # noqa: E402
from tests.support.type_proof import LIMIT  # noqa: E402
from tests.training.node.test_types import config_of  # noqa: E402
from training.node import architecture  # noqa: E402

pytestmark = pytest.mark.torch

EXACT = {
    "dtype": "float32",
    "global_batch": "4",
    "micro_batch": "1",
    "max_length": "64",
    "loss_chunk": "16",
    "lora.dropout": "0.0",
}
STEPS = 1
"""Adam's first step has the gradients' signs: of those near zero anybody's rounding decides."""
KINDS = sorted(TRIED)
GRADIENT = "exp_avg/"
"""Of an optimizer's state what holds the gradients, a tenth of each, after Adam's first step."""
GROUPS = 3
"""Of types, each in processes of its own, which end well within their time on a busy machine."""


def _samples():
    dice = random.Random(0)
    made = [[dice.randrange(3, 250) for _ in range(length)] for length in (23, 5, 17, 9, 30, 11, 3, 12)]
    return [(ids, [-100, *ids[1:]]) for ids in made]


MORE = {"samples": _samples()}


def _cases(house, kinds, strategy):
    return [
        {
            "name": f"{kind} {strategy}",
            "model": str(house / kind),
            "steps": STEPS,
            "recipe": {"strategy": strategy},
            "off zero": True,
            "state": True,
        }
        for kind in kinds
    ]


@pytest.fixture(scope="module")
def kinds(request):
    """The types of the tests that were chosen."""
    chosen = {item.callspec.params["kind"] for item in request.session.items if "of_group" in item.fixturenames}
    return [kind for kind in KINDS if kind in chosen]


@pytest.fixture(scope="module")
def house(tmp_path_factory, kinds):
    folder = tmp_path_factory.mktemp("types")
    for kind in kinds:
        torch.manual_seed(0)
        architecture.build(config_of(kind)).float().save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def of_group(house, kinds):
    """What a group's types gave on one rank, and under ZeRO-3 on two."""
    known = {}

    def found(group):
        if group not in known:
            its = kinds[group::GROUPS]
            alone = together(house, 1, EXACT, [*_cases(house, its, "zero0"), *_cases(house, its, "zero3")], **MORE)
            known[group] = alone, together(house, 2, EXACT, _cases(house, its, "zero3"), **MORE)
        return known[group]

    return found


def gradients_of(state):
    return {name: moment for name, moment in state.items() if name.startswith(GRADIENT)}


def apart(found, right):
    """The largest difference of a tensor, of its length. Infinite where there are others, or none to hold against."""
    if not right or found.keys() != right.keys() or not all(one.norm() > 0 for one in right.values()):
        return float("inf")
    return float(torch.stack([(found[name] - one).norm() / one.norm() for name, one in right.items()]).max())


def test_a_difference_is_of_the_tensor_that_differs_most():
    right = {"a": torch.ones(4), "b": torch.ones(100)}
    assert apart(right, right) == 0.0 < LIMIT
    assert apart({"a": torch.ones(4), "b": 1.5 * torch.ones(100)}, right) == pytest.approx(0.5)
    assert not apart(right | {"b": torch.full((100,), float("nan"))}, right) < LIMIT
    assert apart({"a": right["a"]}, right) == apart({}, {}) == float("inf")
    assert apart(right, right | {"b": torch.zeros(100)}) == float("inf"), "without a gradient nothing is shown"


@pytest.mark.representatives
@pytest.mark.parametrize("kind", KINDS)
def test_zero3_learns_what_one_plain_rank_does(kind, kinds, of_group):
    on_one, on_two = of_group(kinds.index(kind) % GROUPS)
    plain = on_one[f"{kind} zero0"]
    for parted in (on_one, on_two):
        found = parted[f"{kind} zero3"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-4) and plain["norms"][0] > 0
        assert found["held_out"] == pytest.approx(plain["held_out"], rel=1e-3)
        gradients = gradients_of(plain["state"])
        assert len(gradients) >= 2 and apart(gradients_of(found["state"]), gradients) < LIMIT
    assert shown(kind.removesuffix("-experts"))["zero3"], "and docs/models.md says so"
