"""Adapted experts under every strategy: on two ranks they learn what they do on one, on which each is held whole."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.proof.test_types_zero3 import EXACT, MORE  # noqa: E402
from tests.support.ranks import together  # noqa: E402
from tests.training.node.test_types import config_of  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import architecture  # noqa: E402
from training.node.outline import model_shape  # noqa: E402
from training.node.strategies.zero import persistence_threshold  # noqa: E402

pytestmark = pytest.mark.torch

KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v2", "qwen3_5_moe_text", "gemma4_text-experts")
EXPERTS = EXACT | {"lora.experts": "true", "lora.experts_rank": "2"}
NOTHING_AGAIN = {"gradient_checkpointing": "false"}
DIVIDED = {"prefetch": 1000}
"""As a large model is: nothing stays gathered."""
SPREAD = {
    "zero0": {"strategy": "zero0"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3, nothing computed again": {"strategy": "zero3"} | NOTHING_AGAIN,
    "pipeline": {"strategy": "pipeline"},
    "pipeline, nothing computed again": {"strategy": "pipeline"} | NOTHING_AGAIN,
}
CASES = [(kind, how) for kind in KINDS for how in SPREAD if "pipeline" not in how or kind == "qwen3_moe"]


def _case(house, kind, how):
    divided = DIVIDED if "zero3" in how else {}
    return {"name": how, "model": str(house / kind), "steps": 2, "recipe": SPREAD[how], "state": True} | divided


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory):
    """What one plain rank gave, and two under each strategy."""
    house, known = tmp_path_factory.mktemp("experts"), {}

    def found(kind):
        if kind not in known:
            torch.manual_seed(0)
            architecture.build(config_of(kind)).float().save_pretrained(house / kind)
            mine = [_case(house, kind, how) for each, how in CASES if each == kind]
            alone = together(house, 1, EXPERTS, mine[:1], name=kind, **MORE)["zero0"]
            known[kind] = alone, together(house, 2, EXPERTS, mine, name=kind, **MORE)
        return known[kind]

    return found


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_two_ranks_learn_what_one_does(kind, how, of_kind):
    alone, on_two = of_kind(kind)
    found, facts = on_two[how], alone["facts"]
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4) and alone["norms"][1] > 0
    assert found["held_out"] == pytest.approx(alone["held_out"], rel=1e-4)
    masters = {name: tensor for name, tensor in alone["state"].items() if name.startswith("master/")}
    assert masters.keys() <= found["state"].keys() and any(".experts.lora_B" in name for name in masters)
    assert sum(tensor.numel() for tensor in masters.values()) == facts["trainable"]
    moments = {name: tensor for name, tensor in alone["state"].items() if name.startswith("exp_avg/")}
    for name, tensor in moments.items():
        assert torch.allclose(found["state"][name], tensor, rtol=1e-3, atol=1e-6 * float(tensor.abs().max() + 1)), name


def test_under_zero3_the_matrices_of_experts_stay_whole_as_all_of_an_adapter_does():
    shape, recipe = model_shape(config_of("qwen3_moe")), load_recipe("tiny", EXPERTS | {"lora.rank": "1"})
    assert (
        persistence_threshold(recipe, shape)
        > 2 * 4 * 64
        >= persistence_threshold(load_recipe("tiny", EXACT | {"lora.rank": "1"}), shape)
    )
