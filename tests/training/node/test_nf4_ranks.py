"""A base model in four bits under every strategy that takes one: the same training on one rank and on two, and each
goes on where another stopped. Real ranks over gloo (tests/support/engine_probe.py).
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("bitsandbytes", reason="needs the [train] extra")

from tests.support import tiny_adapter  # noqa: E402
from tests.support.ranks import said_and_found  # noqa: E402
from tests.support.selection import selected  # noqa: E402

pytestmark = pytest.mark.torch

TAKES_FOUR_BITS = ("zero0", "zero1", "zero2", "pipeline")
HANDED_ON = ("zero0", "zero2", "pipeline")
OFTEN = set(zip(HANDED_ON, HANDED_ON[1:] + HANDED_ON[:1], strict=True))
GOES_ON = [
    pytest.param((before, after), marks=() if (before, after) in OFTEN else pytest.mark.proof)
    for before in HANDED_ON
    for after in HANDED_ON
]
EXACT = {
    "base_precision": "nf4",
    "strategy": "zero0",
    "dtype": "float32",
    "global_batch": "5",
    "micro_batch": "2",
    "lora.dropout": "0.0",
    "optimizer.warmup_steps": "2",
    "optimizer.eps": "1e-5",  # at 1e-8 Adam enlarges rounding where a gradient is nearly nothing
    "seed": "4",
}
STEPS = 4
LOOKED_AT = {"optimizer.grad_clip": "0"}
"""No norm that another order of sums makes differ in its last bit."""
DORA = {"dora": {}, "dora, unquantised": {"base_precision": "dtype"}}


def _samples():
    dice = random.Random(0)
    made = []
    for length in (5, 9, 17, 40, 33, 12, 21, 8, 30, 16):
        ids = [dice.randrange(3, 2000) for _ in range(length)]
        made.append((ids, [-100, -100, *ids[2:]]))
    return made


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    tiny_adapter.write_base(folder / "models" / "tiny")
    return folder


def _group(house, ranks, cases, name):
    """What each case gave on so many ranks, by its name, and what rank 0 said."""
    model = str(house / "models" / "tiny")
    said, found = said_and_found(house, ranks, EXACT, cases, f"{name}-", model=model, samples=_samples())
    return found | {"said": said}


def _case(name, strategy, **more):
    return {"name": name, "steps": STEPS, "recipe": {"strategy": strategy}, "state": True, **more}


def _kept(house, ranks, strategy):
    return str(house / f"{ranks}-{strategy}.pt")


def _resumed(request, house, ranks, first):
    """What goes on with what was left off on `ranks` ranks after step `first`."""
    return [
        _case(f"{before} -> {after}", after, first=first, **{"from": _kept(house, ranks, before)})
        for before, after in selected(request, "goes_on")
    ]


@pytest.fixture(scope="module")
def on_two(house):
    cases = [_case(s, s, keep=_kept(house, 2, s), keep_at=2) for s in TAKES_FOUR_BITS]
    half = {"dtype": "bfloat16"}
    cases += [
        {"name": f"{s} in bf16", "steps": 3, "recipe": half | {"strategy": s}, "state": True} for s in TAKES_FOUR_BITS
    ]
    cases += [_case("looked at", "pipeline", looks=True) | {"recipe": LOOKED_AT | {"strategy": "pipeline"}}]
    return _group(house, 2, cases, "two")


@pytest.fixture(scope="module")
def on_one(request, house, on_two):
    cases = [_case(s, s, keep=_kept(house, 1, s), keep_at=2) for s in TAKES_FOUR_BITS]
    cases += [_case("looked at", "zero0", looks=True) | {"recipe": LOOKED_AT}]
    sixteen = {"base_precision": "dtype", "strategy": "zero0"}
    cases += [{"name": "unquantised", "steps": STEPS, "recipe": sixteen}]
    cases += [{"name": name, "steps": 2, "recipe": {"lora.dora": "true"} | more} for name, more in DORA.items()]
    cases += [_case("offloaded", "zero2") | {"recipe": {"strategy": "zero2", "offload.optimizer": "true"}}]
    return _group(house, 1, cases + _resumed(request, house, 2, 2), "one")


@pytest.fixture(scope="module")
def on_two_again(request, house, on_one):
    return _group(house, 2, _resumed(request, house, 1, 2), "two-again")


def _apart(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp(min=1e-12)).item() for n in theirs)


@pytest.mark.parametrize("strategy", TAKES_FOUR_BITS)
def test_four_bits_on_one_and_two_ranks_are_the_training_of_one_process(on_one, on_two, strategy):
    alone = on_one["zero0"]
    for group in (on_one, on_two):
        assert group[strategy]["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert group[strategy]["norms"] == pytest.approx(alone["norms"], rel=5e-6)
        assert group[strategy]["held_out"] == pytest.approx(alone["held_out"], rel=1e-6)
        assert _apart(group[strategy]["state"], alone["state"]) < 1e-4


def test_two_stages_in_four_bits_are_one_process_to_the_bit_with_looks_between_the_steps(on_one, on_two):
    alone, staged = on_one["looked at"], on_two["looked at"]
    for key in ("losses", "correct", "looks", "held_out"):
        assert staged[key] == alone[key]
    assert len(set(alone["looks"])) == STEPS
    assert staged["state"].keys() == alone["state"].keys()
    assert not [key for key, value in alone["state"].items() if not torch.equal(staged["state"][key], value)]


@pytest.mark.parametrize("strategy", TAKES_FOUR_BITS)
def test_in_bf16_each_of_them_trains_as_near_to_the_others_as_bf16_is(on_two, on_one, strategy):
    """DeepSpeed looks at the parameters' types, and packed weights are no numbers to it."""
    half = on_two[f"{strategy} in bf16"]
    assert half["losses"] == pytest.approx(on_one["zero0"]["losses"][:3], rel=1e-2)
    assert all(tensor.any() for name, tensor in half["state"].items() if name.startswith("master/"))


def test_directions_and_lengths_are_learned_beside_four_bits_too(on_one):
    four, sixteen = on_one["dora"]["losses"], on_one["dora, unquantised"]["losses"]
    assert four[0] != sixteen[0] and four == pytest.approx(sixteen, rel=2e-2)


def test_with_the_optimizer_in_ram_it_is_the_same_training(on_one):
    """What the ladder offers on the way to four bits."""
    assert on_one["offloaded"]["losses"] == pytest.approx(on_one["zero0"]["losses"], rel=1e-6)


def test_four_bits_are_another_training_than_sixteen_and_a_near_one(on_one):
    four, sixteen = on_one["zero0"]["losses"], on_one["unquantised"]["losses"]
    assert four[0] != sixteen[0] and four == pytest.approx(sixteen, rel=2e-2)


@pytest.mark.parametrize("goes_on", GOES_ON)
def test_either_goes_on_where_the_other_stopped_on_another_number_of_ranks(on_one, on_two_again, goes_on):
    before, after = goes_on
    for group in (on_one, on_two_again):
        resumed = group[f"{before} -> {after}"]
        assert resumed["losses"] == pytest.approx(on_one["zero0"]["losses"][2:], rel=1e-5)
        assert _apart(resumed["state"], on_one["zero0"]["state"]) < 1e-4


def test_the_first_group_makes_the_four_bits_and_the_next_take_them(on_two, on_one, on_two_again):
    assert on_two["said"].count("bringing its layers into four bits") == 2, "in fp32 and bf16, for four strategies"
    assert "into four bits" not in on_one["said"] + on_two_again["said"]


def test_what_is_counted_is_the_model_and_not_its_packing(on_one):
    """MFU and the memory of offloading go by it."""
    assert on_one["zero0"]["facts"] == on_one["unquantised"]["facts"]
    assert on_one["zero0"]["elements_loaded"] < on_one["unquantised"]["elements_loaded"]
