"""Every way of spreading a model over ranks computes the same training, and hands it over to every other.

Real ranks over gloo; each group of processes is started once and runs many cases (tests/support/engine_probe.py).
"""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support import tiny_adapter  # noqa: E402
from tests.support.llama_shape import model_shape  # noqa: E402
from tests.support.ranks import samples, together  # noqa: E402
from tests.support.selection import selected  # noqa: E402
from training.cost.strategies import ZERO3, cost_of  # noqa: E402
from training.data.order import Order  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node.model import init_adapter  # noqa: E402
from training.node.strategies.optimizer import adamw  # noqa: E402
from training.node.strategies.strategy import StepResult  # noqa: E402
from training.recipe.strategy_rules import micro_steps  # noqa: E402

pytestmark = pytest.mark.torch

STAGES = ("zero0", "zero1", "zero2", "zero3")
EXACT = {
    "dtype": "float32",
    "global_batch": "5",
    "micro_batch": "2",
    "lora.dropout": "0.0",
    "optimizer.warmup_steps": "2",
    "optimizer.grad_clip": "0.125",
    "optimizer.eps": "1e-5",  # at 1e-8 Adam enlarges rounding where a gradient is nearly nothing
    "optimizer.weight_decay": "5.0",
    "lora.modules_to_save": '["norm"]',  # which does not decay
    "seed": "4",
}
"""5 samples in micro-batches of 2: on 2, 3 and 4 ranks some have less to do than others.

Under seed 0 one gradient of thousands is 5e-10, less than what its sum rounds: Adam makes a step of it all the same,
another on each number of ranks."""
PARITY = {
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": "0",
    "optimizer.lr": "1e-3",
    "optimizer.eps": "1e-8",  # the Trainer's
}
PARTS = ("master", "exp_avg", "exp_avg_sq")
PREFETCH = 179_000
"""To its layers what the real one is to a 14B's."""
NEXT = dict(zip(STAGES, STAGES[1:] + STAGES[:1], strict=True))
HANDED_ON = {(4, 3): 2, (2, 3): 2, (3, 1): 3}
"""From so many ranks to so many, after which step."""
GOES_ON = [
    pytest.param((ranks, before, after), marks=() if NEXT[before] == after and 4 not in ranks else pytest.mark.proof)
    for ranks in HANDED_ON
    for before in STAGES
    for after in STAGES
]
CHECKPOINTED = [pytest.param(stage, marks=() if stage in {"zero0", "zero3"} else pytest.mark.proof) for stage in STAGES]
TOKENS = ("<|im_end|>", "<|im_start|>")
HEADS = {
    "head lora": {"lora.targets": '["q_proj", "lm_head"]'},
    "head lora alone": {"lora.targets": '["lm_head"]'},
    "head dora": {"lora.targets": '["q_proj", "lm_head"]', "lora.dora": "true"},
}
"""Heads that are called chunk by chunk; at 16 learned tokens a chunk the ranks have different numbers of them."""
FEW = {"global_batch": "2", "micro_batch": "1"}
"""On three ranks one has nothing to do."""
GROUPS = {1: "on_one", 2: "on_two", 3: "on_three", 4: "on_four"}
"""The fixtures, by their ranks; of four, one has nothing to do."""
WHOLE = {"tuning": "full", "lora.modules_to_save": "[]"}
KINDS = {
    "rslora": {"lora.rslora": "true"},
    "dora": {"lora.dora": "true"},
    "dora under zero3": {"lora.dora": "true", "strategy": "zero3"},
    "norm": {"lora.modules_to_save": '["norm"]', "strategy": "zero3"},
    "head": {"lora.modules_to_save": '["lm_head"]', "lora.targets": '["q_proj"]'},
    "tokens": {"lora.trainable_tokens": json.dumps(TOKENS)},
    "full": WHOLE,
    "full under zero3": WHOLE | {"strategy": "zero3", "batching": "padded"},
}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    tiny_adapter.write_base(folder / "tiny")
    _write_deep(folder / "deep")
    return folder


def _write_deep(folder):
    """Layers and head as a 14B's to one another, at a 30,000th of the width squared."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sides = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=5470, num_hidden_layers=24, tie_word_embeddings=False, **sides))
    model.save_pretrained(folder)


def _group(house, ranks, cases, **more):
    """What each case gave on a group of so many ranks, by its name."""
    return together(house, ranks, EXACT, cases, **more)


def _state(house, world, stage):
    return str(house / f"{world}-{stage}.pt")


@pytest.fixture(scope="module")
def on_every_number_of_ranks(request):
    """Every stage without checkpointing and with half of it; a LoRA of the head's own under zero3 with and without."""
    off = {"gradient_checkpointing": "false"}
    cases = []
    for stage in selected(request, "checkpointed"):
        for name, checkpointed in (("kept", "false"), ("partly", "1")):
            recipe = {"strategy": stage, "gradient_checkpointing": checkpointed}
            cases.append({"name": f"{name} {stage}", "steps": 4, "recipe": recipe})
    settings = {"strategy": "zero3", "loss_chunk": "16"}
    cases += [{"name": head, "steps": 2, "recipe": settings | off | recipe} for head, recipe in HEADS.items()]
    return [*cases, {"name": "head lora, checkpointed", "steps": 2, "recipe": settings | HEADS["head lora"]}]


def _parity(strategy="zero3"):
    return {"name": "parity", "steps": 20, "recipe": PARITY | {"strategy": strategy}}


@pytest.fixture(scope="module")
def on_four(house):
    cases = [_parity()]
    return _group(house, 4, [*cases, *_stages(house, 4, after=2)])


def _stages(house, ranks, after):
    """Each stage, whose state is kept after a step."""
    for stage in STAGES:
        keep = {"keep": _state(house, ranks, stage), "keep_at": after}
        yield {"name": stage, "steps": 4, "recipe": {"strategy": stage}, "state": True} | keep


def _going_on(request, house, ranks):
    """Each ends after step 4."""
    for handed_on, before, after in selected(request, "goes_on"):
        if handed_on[1] == ranks:
            request.getfixturevalue(GROUPS[handed_on[0]])  # which keeps the states
            yield {
                "name": f"{handed_on} {before} -> {after}",
                "steps": 4,
                "first": HANDED_ON[handed_on],
                "recipe": {"strategy": after},
                "from": _state(house, handed_on[0], before),
                "state": True,
            }


@pytest.fixture(scope="module")
def on_three(request, house, on_every_number_of_ranks):
    cases = [*_going_on(request, house, 3), *_stages(house, 3, after=3), *on_every_number_of_ranks]
    few = [{"name": f"few {stage}", "steps": 2, "recipe": FEW | {"strategy": stage}} for stage in ("zero0", "zero3")]
    return _group(house, 3, cases + few)


@pytest.fixture(scope="module")
def on_one(request, house, on_every_number_of_ranks):
    """The reference; what three ranks left off; and every kind of trainable part, saved."""
    cases = [{**_parity("zero0"), "state": True}]
    cases += [{"name": stage, "steps": 4, "recipe": {"strategy": stage}, "state": True} for stage in STAGES]
    cases += [
        {"name": f"{head}, whole", "steps": 2, "recipe": {"strategy": "zero0"} | recipe}
        for head, recipe in HEADS.items()
    ]
    cases += _going_on(request, house, 1)
    cases.append({"name": "few", "steps": 2, "recipe": FEW | {"strategy": "zero0"}})
    for kind, recipe in KINDS.items():
        saved = str(house / kind.replace(" ", "-"))
        cases.append(
            {"name": kind, "steps": 2, "recipe": {"strategy": "zero0"} | recipe, "saved": saved, "state": True}
        )
    return _group(house, 1, cases + on_every_number_of_ranks)


@pytest.fixture(scope="module")
def on_two(request, house, on_every_number_of_ranks):
    cases = [_parity()] if 2 in selected(request, "parity") else []
    deep = {"model": str(house / "deep"), "steps": 2, "recipe": {"strategy": "zero3", "lora.rank": "4"}}
    if selected(request, "deep"):
        cases += [{"name": "deep", "prefetch": PREFETCH} | deep, {"name": "deep, kept whole"} | deep]
    cases += _stages(house, 2, after=2)
    cases.append({"name": "padded", "steps": 4, "recipe": {"strategy": "zero2", "batching": "padded"}, "state": True})
    offload = {"strategy": "zero3", "offload.parameters": "true", "offload.optimizer": "true"}
    cases.append({"name": "offloaded", "steps": 4, "recipe": offload, "state": True})
    two = {"strategy": "zero2", "offload.optimizer": "true"}
    cases.append({"name": "offloaded optimizer", "steps": 4, "recipe": two, "state": True})
    for stage in STAGES:
        full = WHOLE | {"strategy": stage}
        cases.append({"name": f"full {stage}", "steps": 2, "recipe": full, "state": True})
    return _group(house, 2, cases + on_every_number_of_ranks)


@pytest.fixture(scope="module")
def from_nothing(house):
    """In each stage a state gathered before any step, and a run that begins with it."""
    cases = []
    for stage in STAGES:
        state = str(house / f"fresh-{stage}.pt")
        shared = {"steps": 2, "recipe": {"strategy": stage, "dtype": "bfloat16"}, "state": True}
        cases.append({"name": f"fresh {stage}", **shared, "keep": state, "keep_at": 0})
        cases.append({"name": f"begun {stage}", **shared, "from": state, "first": 0})
    return _group(house, 1, cases)


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_is_whole_before_the_first_update_too(house, from_nothing, stage):
    """As when fp16 has skipped every step so far: Adam has no moments yet."""
    kept = torch.load(house / f"fresh-{stage}.pt", weights_only=True)
    fresh, begun = from_nothing[f"fresh {stage}"], from_nothing[f"begun {stage}"]
    assert kept.keys() == fresh["state"].keys()
    for key, value in kept.items():
        assert value.shape == fresh["state"][key].shape and value.dtype == torch.float32, key
        assert key.startswith("master/") or not value.any(), key
    assert begun["losses"] == fresh["losses"] and begun["norms"] == fresh["norms"]
    assert all(torch.equal(begun["state"][key], value) for key, value in fresh["state"].items())


def _apart(ours, theirs, key="master/"):
    """Largest relative distance of a tensor from its counterpart."""
    assert ours.keys() == theirs.keys()
    names = [name for name in theirs if name.startswith(key)]
    return max(((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp(min=1e-12)).item() for n in names)


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.proof)])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_on_several_unequal_ranks_computes_what_one_process_does(request, on_one, stage, ranks):
    alone, found = on_one["zero0"], request.getfixturevalue(GROUPS[ranks])[stage]
    assert min(alone["norms"]) > 0.125, "clipping must take part"
    assert found["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-6)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert found["norms"][0] == pytest.approx(alone["norms"][0], rel=1e-6)
    assert found["norms"] == pytest.approx(alone["norms"], rel=5e-6)
    assert found["correct"] == alone["correct"]
    assert found["held_out"] == pytest.approx(alone["held_out"], rel=1e-6)
    assert _apart(found["state"], alone["state"]) < 1e-4
    gathered = {name: t.shape for name, t in found["state"].items()}
    assert gathered == {f"{part}/{n}": s for part in PARTS for n, s in found["shapes"].items()}


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_a_rank_without_anything_to_learn_from_takes_part(on_one, on_three, stage):
    alone, found = on_one["few"], on_three[f"few {stage}"]
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(alone["norms"], rel=5e-6)


@pytest.mark.parametrize("checkpointed", CHECKPOINTED)
def test_checkpointing_on_or_off_is_the_same_training_in_every_stage_on_one_to_three_ranks(
    on_one, on_two, on_three, checkpointed
):
    alone = on_one["zero0"]
    for group in (on_one, on_two, on_three):
        assert group[f"kept {checkpointed}"]["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert group[f"kept {checkpointed}"]["norms"] == pytest.approx(alone["norms"], rel=5e-6)
        partly = group[f"partly {checkpointed}"]
        assert (partly["losses"], partly["norms"]) == (group[checkpointed]["losses"], group[checkpointed]["norms"]), (
            "to the bit"
        )
        assert group[checkpointed]["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert group[checkpointed]["norms"] == pytest.approx(alone["norms"], rel=5e-6)


@pytest.mark.parametrize("head", HEADS)
def test_a_lora_on_the_head_trains_where_the_ranks_have_different_numbers_of_chunks(on_one, on_two, on_three, head):
    alone = on_one[f"{head}, whole"]
    assert alone["losses"][1] != on_one["zero0"]["losses"][1], "another training than without it"
    for group in (on_one, on_two, on_three):
        for case in {head, f"{head}, checkpointed"} & group.keys():
            assert group[case]["losses"] == pytest.approx(alone["losses"], rel=1e-6), case
            assert group[case]["norms"] == pytest.approx(alone["norms"], rel=5e-6), case


@pytest.mark.parametrize(
    ("loss", "stepped", "wrong"),
    [
        (7.55, StepResult(1.662, False), False),
        (7.65, StepResult(1.996e13, False), False),
        (7.64, StepResult(math.nan, False), True),
        (7.62, StepResult(0.0, False), True),
        (math.nan, StepResult(1.0, False), True),
        (7.62, StepResult(math.inf, skipped=True), False),
        (0.0, StepResult(0.0, False), False),
    ],
)
def test_a_run_with_a_loss_and_no_gradient_at_all_has_gone_wrong(loss, stepped, wrong):
    """The first four as the tiny model gave them, clipped, at a rate of 1e3: with 0 it used to finish."""
    from training.node.finetune import has_diverged

    assert has_diverged(loss, stepped) is wrong


def test_vectors_and_the_biases_of_experts_do_not_decay():
    sides = {"q_proj.lora_A.weight": (2, 3), "norm.weight": (3,), "experts.gate_up_proj_bias": (4, 6)}
    trained = {name: torch.nn.Parameter(torch.ones(each)) for name, each in sides.items()}
    groups = adamw(load_recipe("tiny", EXACT), trained).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 5.0), (2, 0.0)]


def test_padded_and_offloaded_runs_are_the_same_training(on_one, on_two):
    for case in ("padded", "offloaded", "offloaded optimizer"):
        assert on_two[case]["losses"] == pytest.approx(on_one["zero0"]["losses"], rel=1e-6), case
        assert _apart(on_two[case]["state"], on_one["zero0"]["state"]) < 1e-3, case


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_trained_whole_is_gathered_whole_from_every_stage(house, on_two, stage):
    """Slices that no rank keeps whole: a state read without gathering them would be empty."""
    from safetensors.torch import load_file

    base = load_file(house / "tiny" / "model.safetensors")
    full = on_two[f"full {stage}"]
    masters = {name.removeprefix("master/"): t for name, t in full["state"].items() if name.startswith("master/")}
    assert {name: t.shape for name, t in masters.items()} == {name: t.shape for name, t in base.items()}
    assert all(not torch.equal(masters[name], base[name].float()) for name in base)
    assert full["losses"] == pytest.approx(on_two["full zero0"]["losses"], rel=1e-6)
    assert _apart(full["state"], on_two["full zero0"]["state"]) < 1e-3
    assert full["facts"]["trainable"] == full["facts"]["parameters"] == sum(t.numel() for t in base.values())


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_gathered_is_the_trained_state_and_none_of_the_base(on_two, stage):
    state, facts = on_two[stage]["state"], on_two[stage]["facts"]
    assert sum(tensor.numel() for tensor in state.values()) == 3 * facts["trainable"] < facts["parameters"] / 2
    assert {name.split("/")[0] for name in state} == set(PARTS)
    assert all(".lora_" in name or name.endswith("model.norm.weight") for name in state)


def test_under_zero3_no_rank_ever_holds_the_whole_base(on_two):
    parameters = on_two["zero3"]["facts"]["parameters"]
    assert on_two["zero3"]["elements_loaded"] < 0.52 * parameters
    assert on_two["zero2"]["elements_loaded"] == parameters


@pytest.mark.proof  # two models of 24 layers
@pytest.mark.parametrize("deep", ["deep"])
def test_zero3_gathers_what_the_plan_says(house, on_two, deep, monkeypatch):
    """At once, for its memory; and in a step, for the wire."""
    shape = model_shape(json.loads((house / deep / "config.json").read_text()))
    whole = on_two["deep, kept whole"]
    recipe = load_recipe("tiny", EXACT)
    count = micro_steps(recipe.global_batch, 2, recipe.micro_batch)
    assert whole["gathered_at_once"] <= ZERO3.gathered_elements(shape) == shape.parameters
    assert whole["gathered_a_step"] == pytest.approx(count * shape.parameters, rel=0.01)
    monkeypatch.setattr(ZERO3, "WHOLE", 0)
    monkeypatch.setattr(ZERO3, "PREFETCH", PREFETCH)
    parted = on_two["deep"]
    together = ZERO3.gathered_elements(shape)
    assert 0.7 * together < parted["gathered_at_once"] < 1.08 * together < 0.2 * shape.parameters
    assert parted["gathered_a_step"] == pytest.approx(count * ZERO3.RE_GATHERED * shape.parameters, rel=0.05)
    assert parted["losses"] == whole["losses"]


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2"])
def test_gradients_are_summed_as_often_as_the_plan_says(house, on_two, stage):
    shape = model_shape(json.loads((house / "tiny" / "config.json").read_text()))
    recipe = load_recipe("tiny", EXACT | {"strategy": stage})
    count, trainable = micro_steps(recipe.global_batch, 2, recipe.micro_batch), on_two[stage]["facts"]["trainable"]
    assert count == 2 and trainable == shape.facts(recipe).trainable + shape.hidden, "the plan counts no norm"
    gathered = 0 if stage == "zero0" else 4 * trainable
    sums = 2 * on_two[stage]["summed_a_step"] + gathered
    assert cost_of(recipe).step(shape, recipe, 2, count).received_bytes == pytest.approx(sums / 2, rel=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_knows_what_is_trained_and_nothing_else(on_two, stage):
    trainable = on_two[stage]["facts"]["trainable"]
    share = trainable if stage == "zero0" else trainable / 2
    assert share <= on_two[stage]["elements_optimized"] < share * 1.01


@pytest.mark.parametrize("goes_on", GOES_ON)
def test_every_stage_and_world_size_goes_on_from_every_other(on_one, on_three, goes_on):
    (ranks, before, after), undisturbed = goes_on, on_one["zero0"]
    case = {3: on_three, 1: on_one}[ranks[1]][f"{ranks} {before} -> {after}"]
    assert len(case["losses"]) == 4 - HANDED_ON[ranks]
    assert case["losses"] == pytest.approx(undisturbed["losses"][-len(case["losses"]) :], rel=1e-5)
    assert _apart(case["state"], undisturbed["state"]) < 1e-4


def _saved(house, kind):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = house / kind.replace(" ", "-")
    if KINDS[kind].get("tuning") == "full":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(house / "tiny", dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_loads_elsewhere_and_gives_the_trained_loss(house, on_one, kind):
    """Plain PEFT, or plain transformers, on the same three held-out samples."""
    model = _saved(house, kind).eval()
    total = 0.0
    for ids, labels in samples()[:3]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
    assert on_one[kind]["held_out"] == pytest.approx(total, rel=5e-6)
    assert abs(on_one[kind]["held_out"] / on_one["zero0"]["held_out"] - 1) > 1e-6, "another training than plain LoRA's"


def test_each_kind_trains_what_it_says(on_one):
    names = {
        kind: {n.removeprefix("master/") for n in on_one[kind]["state"] if n.startswith("master/")} for kind in KINDS
    }
    assert any(name.endswith("lora_magnitude_vector") for name in names["dora"])
    assert "base_model.model.lm_head.weight" in names["head"]
    assert "base_model.model.model.norm.weight" in names["norm"]
    rows = on_one["tokens"]["state"]["master/base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert rows.shape == (len(TOKENS), 128)


def _by_transformers(house):
    """The first losses of transformers.Trainer with PEFT: same data, order, seed, fp32."""
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    recipe = load_recipe("tiny", EXACT | PARITY)
    given = samples()
    order = Order(len(given), recipe.seed, recipe.global_batch)
    rows = [given[number] for step in range(20) for number in order.step(step)]
    seen = []

    class Watched(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(rows)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            seen.append(loss.item())
            return loss

    base = AutoModelForCausalLM.from_pretrained(house / "tiny", dtype=torch.float32)
    lora = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "modules_to_save": ["model.norm"]}
    model = get_peft_model(base, LoraConfig(**lora))
    init_adapter(model, recipe.seed)
    arguments = TrainingArguments(
        output_dir=str(house / "trainer"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=5,
        max_steps=20,
        learning_rate=recipe.optimizer.lr,
        lr_scheduler_type="constant",
        max_grad_norm=recipe.optimizer.grad_clip,
        weight_decay=recipe.optimizer.weight_decay,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)} for ids, labels in rows]
    gather = lambda parts: {key: torch.tensor([part[key] for part in parts]) for key in parts[0]}  # noqa: E731
    Watched(model=model, args=arguments, train_dataset=data, data_collator=gather).train()
    return [sum(seen[i : i + 5]) for i in range(0, 100, 5)]


@pytest.mark.parametrize(
    "parity", [1, pytest.param(2, marks=pytest.mark.proof), pytest.param(4, marks=pytest.mark.proof)]
)
def test_the_first_twenty_losses_are_those_of_transformers_trainer_with_peft(request, house, on_one, parity):
    theirs = _by_transformers(house)
    ours = on_one["parity"]["losses"]
    assert theirs[19] != pytest.approx(theirs[0], rel=1e-2), "twenty steps change something"
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert request.getfixturevalue(GROUPS[parity])["parity"]["losses"] == pytest.approx(ours, rel=5e-6)
