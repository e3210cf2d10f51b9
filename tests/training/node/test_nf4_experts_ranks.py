"""A mixture, or a model that sees images too, in four bits under every strategy that takes one: on two ranks it learns
what it does on one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("bitsandbytes", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.proof.test_types_zero3 import EXACT, MORE  # noqa: E402
from tests.support.ranks import together  # noqa: E402
from tests.training.node.test_types import config_of  # noqa: E402
from training.node import architecture  # noqa: E402

pytestmark = pytest.mark.torch

FOUR = EXACT | {"base_precision": "nf4"}
NOTHING_AGAIN = {"gradient_checkpointing": "false"}
SPREAD = {
    "zero0": {"strategy": "zero0"},
    "zero1": {"strategy": "zero1"},
    "zero2, nothing computed again": {"strategy": "zero2"} | NOTHING_AGAIN,
    "pipeline": {"strategy": "pipeline"},
    "pipeline, nothing computed again": {"strategy": "pipeline"} | NOTHING_AGAIN,
}
CASES = [(kind, how) for kind in ("qwen3_moe", "gpt_oss", "gemma3", "qwen3_5_moe") for how in SPREAD]
CASES = [(kind, how) for kind, how in CASES if "pipeline" not in how or kind == "qwen3_moe"]


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory):
    """What one plain rank gave, and two under each strategy."""
    house, known = tmp_path_factory.mktemp("data"), {}

    def case(kind, how):
        folder = str(house / "models" / kind)
        return {"name": how, "model": folder, "steps": 2, "recipe": SPREAD[how], "state": True}

    def found(kind):
        if kind not in known:
            torch.manual_seed(0)
            architecture.build(config_of(kind)).float().save_pretrained(house / "models" / kind)
            mine = [case(each, how) for each, how in CASES if each == kind]
            alone = together(house, 1, FOUR, mine[:1], name=kind, **MORE)["zero0"]
            known[kind] = alone, together(house, 2, FOUR, mine, name=kind, **MORE)
        return known[kind]

    return found


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_two_ranks_learn_what_one_does(kind, how, of_kind):
    alone, on_two = of_kind(kind)
    found = on_two[how]
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4) and alone["norms"][1] > 0
    assert found["held_out"] == pytest.approx(alone["held_out"], rel=1e-4)
    masters = [name for name in alone["state"] if name.startswith("master/")]
    assert masters and not any("experts.gate_up" in name or "nf4" in name for name in masters)
    moments = {name: tensor for name, tensor in alone["state"].items() if name.startswith("exp_avg/")}
    for name, tensor in moments.items():
        assert torch.allclose(found["state"][name], tensor, rtol=1e-3, atol=1e-6 * float(tensor.abs().max() + 1)), name
