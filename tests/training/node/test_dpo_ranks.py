"""Goal dpo under every strategy that trains an adapter, on several ranks: the same losses, gradients and weights."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support import tiny_adapter  # noqa: E402
from tests.support.ranks import together  # noqa: E402

pytestmark = pytest.mark.torch

EXACT = {
    "goal": "dpo",
    "dpo.beta": "0.5",
    "dtype": "float32",
    "global_batch": "3",
    "micro_batch": "1",
    "gradient_checkpointing": "false",
    "lora.dropout": "0.0",
    "optimizer.lr": "1e-3",
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": "0",
    "optimizer.grad_clip": "0.25",
}
"""3 pairs a step: on 2 ranks one has an empty micro-batch."""
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "pipeline")
HEAD = {"strategy": "zero3", "lora.targets": '["q_proj", "lm_head"]', "loss_chunk": "16"}


def _pairs():
    """Chosen and rejected in turn, with a prompt of their own; lengths far from equal."""
    dice, made = random.Random(0), []
    for _ in range(9):
        prompt = [dice.randrange(3, 2000) for _ in range(dice.choice([3, 9, 20]))]
        for _ in range(2):
            said = [dice.randrange(3, 2000) for _ in range(dice.choice([2, 8, 30, 50]))]
            made.append((prompt + said, [-100] * len(prompt) + said))
    return made


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    tiny_adapter.write_base(folder / "tiny")
    return folder


def _group(house, ranks):
    cases = [{"name": each, "steps": 4, "recipe": {"strategy": each}, "state": True} for each in STRATEGIES]
    again = {"strategy": "zero3", "gradient_checkpointing": "true"}
    cases += [{"name": "checkpointed", "steps": 4, "recipe": again, "state": True}]
    cases += [{"name": "head", "steps": 3, "recipe": HEAD, "state": True}]
    cases += [{"name": "padded", "steps": 4, "recipe": {"strategy": "zero2", "batching": "padded"}, "state": True}]
    return together(house, ranks, EXACT, cases, name="dpo-", samples=_pairs())


@pytest.fixture(scope="module")
def on_one(house):
    return _group(house, 1)


@pytest.fixture(scope="module")
def on_two(house):
    return _group(house, 2)


def _agree(ours, right):
    assert ours["losses"] == pytest.approx(right["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(right["norms"], rel=1e-4)
    assert ours["correct"] == right["correct"]
    assert ours["held_out"] == pytest.approx(right["held_out"], rel=1e-5)
    for name, value in right["state"].items():
        if name.startswith("master/"):
            assert (ours["state"][name] - value).norm() <= 1e-3 * value.norm(), name


@pytest.mark.parametrize("ranks", ["on_one", "on_two"])
@pytest.mark.parametrize("case", [*STRATEGIES, "checkpointed", "padded"])
def test_each_strategy_learns_from_pairs_as_one_process_does(request, on_one, ranks, case):
    right = on_one["zero0"]
    assert right["losses"][0] == pytest.approx(0.693147, rel=1e-5) and right["losses"][3] < 0.69
    assert min(right["norms"]) > 0.25, "clipping takes part"
    _agree(request.getfixturevalue(ranks)[case], right)


def test_a_lora_of_the_head_learns_from_pairs_on_any_number_of_ranks(on_one, on_two):
    _agree(on_two["head"], on_one["head"])
    assert any("lm_head" in name for name in on_two["head"]["state"])
