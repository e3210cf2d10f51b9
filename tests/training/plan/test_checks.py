"""The table before launch: every check with what makes it fail, and that nothing else does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.support.llama_shape import model_shape
from training.cost.memory import GIB
from training.cost.shape import PlanError
from training.models.names import load_recipe
from training.plan.data_checks import enough_records, for_rows, shortened
from training.plan.facts import Card, Facts, Known, NodeHardware, read_facts, stop_tokens
from training.plan.fits import Check
from training.plan.predict import CHECKS, Plan, make_plan
from training.recipe.reading import with_changes

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 13824,
    "vocab_size": 152064,
    "eos_token_id": 151645,
}
REPORT = {
    "shape": "messages",
    "records": 1000,
    "bad": 0,
    "empty": 0,
    "truncated": 10,
    "samples": 1000,
    "tokens": 600_000,
    "learned_tokens": 200_000,
    "rows": 300,
    "longest": 2048,
    "template": True,
    "end_of_turn": "<|im_end|>",
    "end_of_turn_id": 151645,
    "end_of_turn_learned": True,
    "pad_id": 151643,
    "eos_id": 151645,
}
A10 = {"name": "NVIDIA A10", "memory_gib": 22.49}
MACHINE = {"gpus": [A10], "ram_gib": 188.0, "disk_free_gib": 300.0}
INSTRUCT = {"eos_token_id": [151645, 151643]}
"""generation_config.json of Qwen2.5-14B-Instruct; the base model's says 151643."""


def facts(generation: dict[str, Any] | None = None, machine: dict[str, Any] | None = None, **report: Any) -> Facts:
    """Four single-A10 nodes, a thousand records, Qwen2.5-14B-Instruct, unless said otherwise."""
    has = {**MACHINE, **(machine or {})}
    outline = model_shape(CONFIG).to_outline()
    prepared = {"report": {**REPORT, **report}, "disk_free_gib": has["disk_free_gib"], "outline": outline}
    cards = tuple(Card(gpu["name"], (gpu["memory_gib"] or math.inf) * GIB) for gpu in has["gpus"])
    nodes = [NodeHardware(f"te{n}", 1, cards, has["ram_gib"] * GIB) for n in range(1, 5)]
    prepared |= {"model": CONFIG, "generation": INSTRUCT if generation is None else generation}
    return read_facts(prepared, nodes, Known(10e9, "check-1"))


CAREFUL = {"strategy": "zero3", "micro_batch": 1, "gradient_checkpointing": True}
"""What the recipe leaves to the plan, said."""


def plan(known: Facts, anyway: bool = False, **changes: Any) -> Plan:
    return make_plan(with_changes(load_recipe("qwen2.5-14b"), **{**CAREFUL, **changes}), known, anyway)


def found(made: Plan, name: str) -> Check:
    return next(check for check in made.checks if check.name == name)


def problems(made: Plan) -> dict[str, str]:
    return {check.name: check.severity for check in made.checks if check.severity != "ok"}


ETHERNET = 1.7e9
"""Bytes a second of 16 Gbit/s; what is not about the network is tried with a fast one."""


def test_a_sound_run_has_one_row_a_check_and_no_error():
    made = plan(facts())
    assert len(made.checks) == len(CHECKS) == len({check.name for check in made.checks})
    assert problems(made) == {} and made.errors == []


def test_what_is_predicted_is_kept_for_the_report():
    made = plan(facts()).predicted
    assert made["total_steps"] == math.ceil(2 * 300 / 16)
    assert made["tokens_per_step"] == 32_000
    assert made["memory_gib"] == pytest.approx(sum(made["parts"].values()), abs=0.01)
    assert 10 < made["memory_gib"] < 15
    start = 60 + 2 * facts().shape.parameters / 150e6
    assert made["minutes"] == pytest.approx((start + made["total_steps"] * made["step_s"]) / 60, abs=0.1)


def test_the_articles_run_fails_for_four_named_reasons():
    """15 records, 200 warm-up steps, the base model, pad = eos."""
    base = facts({"eos_token_id": 151643}, samples=15, records=15, truncated=0, rows=15, pad_id=151643, eos_id=151643)
    made = plan(base, optimizer={"warmup_steps": 200}, base_model="Qwen/Qwen2.5-14B")
    assert [sentence.split(":")[0] for sentence in made.errors] == [
        "records",
        "end of turn",
        "padding token",
        "warm-up",
    ]
    assert "Qwen/Qwen2.5-14B is a base model" in found(made, "end of turn").cure


BASE = {"eos_token_id": 151643}


@pytest.mark.parametrize(
    "cure",
    [
        {"tuning": "full", "offload": {"optimizer": True}, "strategy": "zero3"},
        {"lora": {"trainable_tokens": ("<|im_end|>",)}},
        {"lora": {"modules_to_save": ("lm_head",)}},
        {"lora": {"targets": ("q_proj", "lm_head")}},
    ],
)
def test_a_base_model_learns_to_stop_where_the_tokens_own_row_is_trained(cure: dict[str, Any]):
    assert found(plan(facts(BASE)), "end of turn").severity == "error"
    assert found(plan(facts(BASE), **cure), "end of turn").severity == "ok"
    assert found(plan(facts(BASE), lora={"trainable_tokens": ("<|im_start|>",)}), "end of turn").severity == "error"
    assert found(plan(facts(BASE), lora={"modules_to_save": ("embed_tokens",)}), "end of turn").severity == "error"


def test_an_end_of_turn_that_no_sample_teaches_is_a_warning():
    assert found(plan(facts(end_of_turn_learned=False)), "end of turn").severity == "warning"


def test_a_template_that_ends_turns_with_plain_words_is_a_warning():
    made = found(plan(facts(end_of_turn=None, end_of_turn_id=None)), "end of turn")
    assert made.severity == "warning" and "writes none" in made.value


def test_plain_text_has_no_turns_and_needs_no_template():
    made = plan(facts(BASE, shape="text", template=False))
    assert problems(made) == {}


def test_turns_without_a_chat_template_are_refused_and_pairs_are_not():
    assert found(plan(facts(template=False)), "chat template").severity == "error"
    for plain in ("prompt/completion", "alpaca"):
        assert found(plan(facts(template=False, shape=plain)), "chat template").severity == "ok"


def test_the_models_own_stops_come_from_generation_config_then_config_then_tokenizer():
    assert stop_tokens({"eos_token_id": [2, 3]}, {"eos_token_id": 1}, 4) == {2, 3}
    assert stop_tokens({}, {"eos_token_id": 1}, 4) == {1}
    assert stop_tokens({"eos_token_id": None}, {}, 4) == {4}
    assert stop_tokens({}, {}, None) == frozenset()
    assert stop_tokens({"eos_token_id": [None, True, 2]}, {"eos_token_id": [[0], -1]}, 4) == {2}


SAME = {"pad_id": 151645}


def test_padding_with_the_end_of_a_sequence_is_an_error_where_rows_are_padded_or_it_was_asked_for():
    """Chat models such as DeepSeek's come so; packed rows are never padded, and their end is learned already."""
    assert found(plan(facts(**SAME)), "padding token").severity == "warning"
    assert found(plan(facts(**SAME), batching="padded"), "padding token").severity == "error"
    assert found(plan(facts(**SAME), pad_token="<|im_end|>"), "padding token").severity == "error"
    assert found(plan(facts(), batching="padded"), "padding token").severity == "ok"


@pytest.mark.parametrize(
    ("warmup", "severity"), [(0, "ok"), (11, "ok"), (12, "warning"), (37, "warning"), (38, "error"), (200, "error")]
)
def test_warm_up_against_38_steps(warmup: int, severity: str):
    check = found(plan(facts(), optimizer={"warmup_steps": warmup}), "warm-up")
    assert check.severity == severity
    assert f"{warmup} of 38 steps" in check.value


def test_epochs_that_are_fewer_steps_than_the_warm_up_shorten_it_to_a_tenth_of_them():
    few = for_rows(with_changes(load_recipe("qwen2.5-14b"), epochs=3.0), 40)
    assert few.total_steps(40) == 8 and few.optimizer.warmup_steps == 0
    own = load_recipe("qwen2.5-14b")
    assert for_rows(own, 3000) is own


def test_steps_that_somebody_counted_do_not_change_the_recipe_when_the_data_are_known():
    counted = with_changes(load_recipe("qwen2.5-14b"), epochs=None, steps=5)
    assert for_rows(counted, 40) is counted


def test_one_step_that_goes_over_few_rows_more_often_than_was_asked_says_so():
    value = found(plan(facts(rows=4), epochs=3.0, optimizer={"warmup_steps": 0}), "epochs").value
    assert value == "4 epochs in 1 step: 3 asked for, but every step takes 16 rows"


@pytest.mark.parametrize(("samples", "severity"), [(15, "error"), (29, "error"), (30, "warning"), (100, "ok")])
def test_records_that_are_too_few(samples: int, severity: str):
    check = found(plan(facts(samples=samples)), "records")
    assert check.severity == severity
    assert ("--anyway" in check.cure) == (severity == "error")


def test_fewer_rows_than_a_step_takes_are_a_warning_with_a_batch_that_fits():
    check = found(plan(facts(rows=12)), "records")
    assert check.severity == "warning" and check.cure.endswith("--set global_batch=3")


@pytest.mark.parametrize(
    ("name", "report", "severity"),
    [
        ("truncated", {"truncated": 50}, "ok"),
        ("truncated", {"truncated": 51}, "warning"),
        ("truncated", {"truncated": 501}, "error"),
        ("duplicates", {"duplicates": 10}, "ok"),
        ("duplicates", {"duplicates": 11}, "warning"),
        ("special tokens", {}, "ok"),
        ("special tokens", {"marked": 1, "marks": ["<s>"]}, "warning"),
        ("left out", {"empty": 1}, "warning"),
        ("left out", {"bad": 1}, "warning"),
        ("left out", {"empty": 501}, "error"),
        ("tokens a step", {"tokens": 9_000}, "ok"),  # 19 steps an epoch: there is nothing to give
        ("tokens a step", {"tokens": 90_000, "rows": 3000}, "warning"),
        ("tokens a step", {"tokens": 60_000_000}, "warning"),
    ],
)
def test_shares_of_the_data(name: str, report: dict[str, int], severity: str):
    assert found(plan(facts(**report)), name).severity == severity


@pytest.mark.parametrize(
    ("longest", "said"),
    [
        (2348, "--set max_length=2348 cuts none; or split them"),
        (90_000, "--set max_length=32768 is the most that the model takes; or split them"),
    ],
)
def test_cut_records_name_the_length_that_would_cut_none(longest, said):
    known = facts(truncated=501, longest_uncut=longest)
    known = replace(known, config={**known.config, "max_position_embeddings": 32768})
    assert found(plan(known), "truncated").cure == f"their ends are not learned; {said}"


def test_what_is_held_out_is_counted_so_that_the_records_add_up():
    known = replace(facts(records=71, samples=71, bad=1), held_out=8)
    assert found(plan(known), "records").value.startswith("71 to learn from (8 more held out), ")
    assert found(plan(known), "left out").value.endswith(", of 80")


def test_many_epochs_are_a_warning():
    check = found(plan(facts(), epochs=11), "epochs")
    assert check.severity == "warning" and check.value.startswith("11 epochs")


def test_a_long_time_between_saves_is_a_warning_with_a_better_interval():
    """A step takes about 105 s over Ethernet: 25 of them 44 minutes."""
    known = replace(facts(), bytes_per_s=ETHERNET)
    slow = plan(known, save_every=25)
    assert found(slow, "saving").severity == "warning"
    better = int(found(slow, "saving").cure.rpartition("=")[2])
    assert found(plan(known, save_every=better), "saving").severity == "ok"
    assert found(plan(known, save_every=500), "saving").severity == "warning"
    assert found(plan(facts(), save_every=500), "saving").severity == "ok", "a short run is saved at its end"


def card(name: str, gib: float) -> dict[str, Any]:
    return {"gpus": [{"name": name, "memory_gib": gib}]}


def test_memory_above_the_cards_is_an_error_and_within_five_per_cent_a_warning():
    need = plan(facts()).predicted["memory_gib"] + 2.6e9 / GIB
    sizes = (need - 0.1, need * 1.04, need * 1.06)
    checks = [found(plan(facts(machine=card("NVIDIA A10", size))), "GPU memory") for size in sizes]
    assert [check.severity for check in checks] == ["error", "warning", "ok"]
    assert "--set offload.optimizer=true" in checks[0].cure, "what would make it fit"


def test_too_little_memory_names_changes_that_fit_or_says_that_none_does():
    tight = found(plan(facts(machine=card("NVIDIA A10", 9.0))), "GPU memory")
    assert tight.severity == "error" and tight.cure.count("max_length=") == 1
    settings = dict(word.split("=") for word in tight.cure.split() if "=" in word)
    changes: dict[str, Any] = {"max_length": int(settings["max_length"])}
    changes["offload"] = {key.partition(".")[2]: True for key in settings if key.startswith("offload.")}
    assert found(plan(facts(machine=card("NVIDIA A10", 9.0)), **changes), "GPU memory").severity != "error"
    assert "nothing in the recipe" in found(plan(facts(machine=card("NVIDIA A10", 3.0))), "GPU memory").cure


def test_a_card_that_does_not_say_its_memory_stops_nobody():
    assert (
        found(plan(facts(machine={"gpus": [{"name": "NVIDIA A10", "memory_gib": None}]})), "GPU memory").severity
        == "ok"
    )


def test_anyway_overrules_estimates_and_no_facts():
    small = facts(BASE, machine=card("NVIDIA A10", 8.0), samples=15)
    assert {name for name, severity in problems(plan(small)).items() if severity == "error"} == {
        "records",
        "GPU memory",
        "end of turn",
    }
    assert [sentence.split(":")[0] for sentence in plan(small, anyway=True).errors] == ["end of turn"]


def test_offload_needs_the_nodes_ram():
    greedy = {"tuning": "full", "offload": {"optimizer": True, "parameters": True}}
    assert found(plan(facts(machine={"ram_gib": 300.0}), **greedy), "RAM").severity == "ok"
    check = found(plan(facts(machine={"ram_gib": 60.0}), **greedy), "RAM")
    assert check.severity == "error" and "of 60.0 GiB" in check.value
    assert found(plan(facts(machine={"ram_gib": 4.0})), "RAM").severity == "ok"
    whole = {"tuning": "full"}
    assert found(plan(facts(), **whole), "RAM").severity == "ok", "14.8 billion parameters, 12 bytes of each"
    check = found(plan(facts(machine={"ram_gib": 170.0}), **whole), "RAM")
    assert check.severity == "error" and "a save on the head" in check.value and "tuning=lora" in check.cure


def test_checkpoints_need_room():
    """14 bytes for each of 68.8 million parameters, five times."""
    assert found(plan(facts(machine={"disk_free_gib": 4.4})), "disk").severity == "error"
    assert found(plan(facts(machine={"disk_free_gib": 4.6})), "disk").severity == "ok"
    full = found(plan(replace(facts(), full_nodes=("te3",))), "disk")
    assert full.severity == "error" and "te3" in full.value and "fab ssh te3 -- du" in full.cure


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "Tesla P40", "NVIDIA TITAN V", "NVIDIA GeForce GTX 1080 Ti"])
def test_a_card_that_torch_has_no_kernels_for_is_refused_with_what_is_needed(name: str):
    check = found(plan(facts(machine=card(name, 80.0)), dtype="float16"), "card")
    assert check.severity == "error" and name in check.value and "T4" in check.cure and not check.estimated


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA GeForce RTX 2080 Ti", "NVIDIA TITAN RTX", "Quadro RTX 6000"])
def test_a_card_without_bfloat16_is_told_to_take_float16(name: str):
    known = facts(machine=card(name, 80.0))
    check = found(plan(known), "dtype")
    assert check.severity == "error" and check.cure == "--set dtype=float16"
    assert found(plan(known, dtype="float16"), "dtype").severity == "ok"


@pytest.mark.parametrize("name", ["NVIDIA A10", "NVIDIA RTX 6000 Ada Generation", "NVIDIA H200", "NVIDIA L40S"])
def test_a_card_with_bfloat16_is_warned_of_float16(name: str):
    known = facts(machine=card(name, 80.0))
    assert found(plan(known), "dtype").severity == "ok"
    assert found(plan(known, dtype="float16"), "dtype").severity == "warning"


def test_the_network_is_named_where_it_is_the_bottleneck_or_unknown():
    assert found(plan(replace(facts(), bytes_per_s=ETHERNET)), "time").severity == "warning"
    assert found(plan(facts()), "time").severity == "ok"
    assert "network" in found(plan(replace(facts(), bytes_per_s=None)), "time").value
    assert "card" in found(plan(replace(facts(), card=Card("Mystery 9000", 80 * GIB))), "time").value


def test_nothing_to_learn_from_cannot_be_planned():
    with pytest.raises(PlanError, match="no record"):
        plan(facts(rows=0, samples=0))


def test_on_the_cpu_a_ranks_share_of_the_ram_counts():
    small = facts(machine={"gpus": [], "ram_gib": 16.0})
    check = found(plan(small), "memory a rank")
    assert check.severity == "ok" and "of 16.0 GiB" in check.value
    assert found(plan(replace(small, ranks_per_node=2)), "memory a rank").severity == "error"


def test_samples_share_rows_only_where_the_model_keeps_them_apart():
    assert found(plan(facts()), "batching").value == "packed"
    mixes = replace(facts(), config={**CONFIG, "model_type": "rwkv"})
    check = found(plan(mixes), "batching")
    assert check.severity == "error" and "'rwkv'" in check.value and "--set batching=padded" in check.cure
    assert found(plan(mixes, anyway=True), "batching").severity == "error", "a fact, not an estimate"
    assert found(plan(mixes, batching="padded"), "batching").severity == "ok"
    never = replace(facts(), config={**CONFIG, "model_type": "laguna"})
    assert "a laguna is not trained" in found(plan(never, batching="padded"), "model").value


def test_a_stop_waits_for_steps_as_long_as_these_and_says_so():
    slow = replace(facts(), bytes_per_s=ETHERNET)
    made = plan(slow)
    grace, step_s = made.predicted["stop_grace_s"], made.predicted["step_s"]
    assert step_s > 30 and grace >= 3 * step_s
    assert f"a stop waits up to {grace} s" in found(made, "saving").value
    assert plan(replace(slow, card=None)).predicted["stop_grace_s"] == 60, "an unknown pace is measured as it runs"


def test_a_run_that_is_to_be_seen_online_says_that_the_head_needs_its_own_login():
    online = found(plan(facts(), logging={"wandb": "online"}), "Weights & Biases")
    assert online.severity == "warning" and "/data/env/bin/wandb login" in online.cure
    for chosen in ("off", "offline"):
        assert found(plan(facts(), logging={"wandb": chosen}), "Weights & Biases").severity == "ok"


def test_the_minutes_have_the_looks_at_the_validation_split_in_them():
    without = plan(facts(), validation={"fraction": 0.0}).predicted
    seldom = plan(facts(), validation={"fraction": 0.5, "every": 1000}).predicted
    often = plan(facts(), validation={"fraction": 0.5, "every": 1}).predicted
    # as many rows again as are trained on, 0.4 of the time a row, after each step: 300 rows are 300 / batch steps
    look = 0.4 * 300 / load_recipe("qwen2.5-14b").global_batch * without["step_s"] / 60
    assert seldom["minutes"] - without["minutes"] == pytest.approx(look, abs=0.1)
    assert often["minutes"] - without["minutes"] == pytest.approx(look * often["total_steps"], rel=0.01)


def test_a_run_too_short_for_any_warm_up_is_said_to_have_none():
    assert shortened(4, 5) == "no warm-up: the recipe's 5 steps would last as long as the run's 4"
    assert shortened(20, 50) == "warm-up: 2 of 20 steps; the recipe's 50 would last as long as the run"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (4, "every step sees a row more than once, and 1 step in all teaches next to nothing; --set global_batch=1"),
        (40, "5 steps in all teach next to nothing; more epochs or steps, or a smaller global_batch, make them more"),
        (160, "few; some hundreds teach a manner, thousands a skill"),
    ],
)
def test_a_run_of_few_steps_is_told_with_what_makes_them_more(rows, said):
    recipe = load_recipe("qwen2.5-7b", {"epochs": "2", "global_batch": "16", "micro_batch": "1"})
    assert enough_records(recipe, 90, rows, paired=False).cure == said


def test_held_out_records_that_are_learned_all_the_same_are_said():
    known = facts()
    assert found(plan(known), "held out") == Check("held out", "ok", "none")
    apart = found(plan(replace(known, held_out=20)), "held out")
    assert (apart.severity, apart.value) == ("ok", "20 records, none of them in the training data too")
    leaked = found(plan(replace(facts(leaked=18), held_out=20)), "held out")
    assert (leaked.severity, leaked.value) == ("warning", "18 of 20 records in the training data too")
