"""The plan's formulas against published parameter counts and published memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.llama_shape import model_shape
from training.cost.cards import Rates, sustained_flops
from training.cost.memory import Memory
from training.cost.pace import pace
from training.cost.shape import ModelShape, flops_per_token
from training.cost.strategies import cost_of
from training.cost.zero import BUCKET
from training.models.names import load_recipe
from training.recipe.reading import with_changes
from training.recipe.recipe import Recipe
from training.recipe.strategy_rules import micro_steps
from training.recipe.tables import Lora

GB = 1e9


def config(kind: str, *numbers: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    values = dict(zip((*keys, "vocab_size"), numbers, strict=True))
    return {"model_type": kind, "tie_word_embeddings": tied, **values, **more}


QWEN_7B = config("qwen2", 28, 3584, 28, 4, 18944, 152064)
QWEN_14B = config("qwen2", 48, 5120, 40, 8, 13824, 152064)
QWEN_3B = config("qwen2", 36, 2048, 16, 2, 11008, 151936, tied=True)

# name: config.json, parameters and matmul parameters in 1e9, parameters of a layer and of LoRA r=16 in 1e6.
# The counts are the ones on the model cards (0.49, 1.54, 3.09, 7.61, 14.7, 32.5, 72.7 billion) and what PEFT prints.
SHAPES = {
    "qwen2.5-0.5b": (config("qwen2", 24, 896, 14, 2, 4864, 151936, tied=True), 0.494, 0.494, 14.9, 8.8),
    "qwen2.5-1.5b": (config("qwen2", 28, 1536, 12, 2, 8960, 151936, tied=True), 1.544, 1.544, 46.8, 18.5),
    "qwen2.5-3b": (QWEN_3B, 3.086, 3.086, 77.1, 29.9),
    "qwen2.5-7b": (QWEN_7B, 7.616, 7.070, 233.1, 40.4),
    "qwen2.5-14b": (QWEN_14B, 14.770, 13.991, 275.3, 68.8),
    "qwen2.5-32b": (config("qwen2", 64, 5120, 40, 8, 27648, 152064), 32.764, 31.984, 487.6, 134.2),
    "qwen2.5-72b": (config("qwen2", 80, 8192, 64, 8, 29568, 152064), 72.706, 71.458, 877.7, 210.5),
    "qwen3-0.6b": (config("qwen3", 28, 1024, 16, 8, 3072, 151936, tied=True, head_dim=128), 0.596, 0.596, 15.7, 10.1),
    "qwen3-8b": (config("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128), 8.191, 7.568, 192.9, 43.6),
    "qwen3-32b": (config("qwen3", 64, 5120, 64, 8, 25600, 151936, head_dim=128), 32.762, 31.984, 487.6, 134.2),
    "deepseek-llm-7b": (config("llama", 30, 4096, 32, 32, 11008, 102400), 6.910, 6.491, 202.4, 37.5),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted_as_published(name: str):
    read, parameters, matmul, layer, lora = SHAPES[name]
    shape = model_shape(read)
    assert shape.parameters / 1e9 == pytest.approx(parameters, abs=0.0006)
    assert shape.matmul_parameters / 1e9 == pytest.approx(matmul, abs=0.0011)
    assert shape.largest.parameters / 1e6 == pytest.approx(layer, abs=0.06)
    assert shape.trainable_parameters(Lora(rank=16)) / 1e6 == pytest.approx(lora, abs=0.06)


def test_peft_prints_the_same_number_for_7b():
    assert model_shape(QWEN_7B).trainable_parameters(Lora(rank=16)) == 40_370_176


def test_lora_counts_targets_whole_modules_token_rows_and_doras_lengths():
    shape = model_shape(QWEN_7B)
    assert shape.trainable_parameters(Lora(rank=16, targets=("q_proj",))) == 28 * 16 * (3584 + 3584)
    plain = shape.trainable_parameters(Lora())
    assert shape.trainable_parameters(Lora(trainable_tokens=("<|im_end|>",))) - plain == 2 * 3584
    assert shape.trainable_parameters(Lora(modules_to_save=("lm_head",))) - plain == 152064 * 3584
    outputs = 3584 + 2 * 512 + 3584 + 2 * 18944 + 3584
    assert shape.trainable_parameters(Lora(dora=True)) - plain == 28 * outputs


def recipe(**changes: Any) -> Recipe:
    return with_changes(load_recipe("qwen2.5-14b"), **changes)


def estimate(shape: ModelShape, asked: Recipe, ranks: int, tokens: int) -> Memory:
    return cost_of(asked).memory(shape, asked, ranks, tokens)


# Qwen 1's shapes, whose memory its authors published (QwenLM/Qwen, README, "Profiling of Memory and Speed"): LoRA of
# rank 64 on all linears, no fused loss, checkpointing, micro-batch 1, on A100-80G. Its MLP is as wide as three
# matrices of these sizes; its vocabulary and depth are the config.json's.
QWEN1 = {
    "7b": model_shape(config("qwen2", 32, 4096, 32, 32, 11008, 151936)),
    "14b": model_shape(config("qwen2", 40, 5120, 40, 40, 13696, 152064)),
    "72b": model_shape(config("qwen2", 80, 8192, 64, 64, 24576, 152064)),
}


UNFUSED = 14
"""Bytes a logit costs without a fused loss: itself in bf16 and three fp32 copies."""


@pytest.mark.parametrize(
    ("name", "strategy", "ranks", "tokens", "published_gb"),
    [
        ("7b", "zero0", 1, 1024, 21.5),
        ("7b", "zero0", 1, 2048, 23.8),
        ("7b", "zero0", 1, 4096, 29.7),
        ("14b", "zero0", 1, 2048, 37.4),
        ("72b", "zero3", 4, 2048, 57.2),
    ],
)
def test_memory_is_what_the_qwen_authors_measured(name: str, strategy: str, ranks: int, tokens: int, published_gb):
    asked = recipe(strategy=strategy, max_length=tokens, lora={"rank": 64})
    needs = estimate(QWEN1[name], asked, ranks, tokens)
    found = replace(needs, loss=UNFUSED * tokens * QWEN1[name].vocab).total / GB
    assert found == pytest.approx(published_gb, abs=2.4)
    assert found == pytest.approx(published_gb, rel=0.1)


def test_the_14b_over_four_a10_needs_about_13_gb_and_less_than_an_a10_has():
    needs = estimate(model_shape(QWEN_14B), recipe(loss_chunk=256), 4, 2048)
    assert needs.total / GB == pytest.approx(12.4, abs=1.0)
    assert needs.weights == 2 * model_shape(QWEN_14B).parameters / 4
    alone = estimate(model_shape(QWEN_14B), recipe(strategy="zero2"), 4, 2048)
    assert alone.total / GB > 32


def test_fewer_bytes_with_every_stage():
    shape = model_shape(QWEN_7B)
    totals = [estimate(shape, recipe(tuning="full", strategy=f"zero{n}"), 4, 1024).total for n in range(4)]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


def test_full_fine_tuning_needs_eighteen_bytes_a_parameter_with_gradients_in_fp32():
    shape = model_shape(QWEN_7B)
    needs = estimate(shape, recipe(tuning="full", strategy="zero0"), 1, 1024)
    assert needs.weights + needs.trainable == 18 * shape.parameters


def test_in_fp32_only_zero3_updates_the_weights_without_a_copy():
    shape = model_shape(QWEN_7B)
    states = {
        name: estimate(shape, recipe(tuning="full", dtype="float32", strategy=name), 1, 1024).trainable
        for name in ("zero0", "zero3")
    }
    assert states["zero0"] - states["zero3"] == pytest.approx(4 * shape.parameters - 4 * BUCKET)


def test_offload_moves_bytes_to_the_ram_and_loses_none():
    shape = model_shape(QWEN_7B)
    on_card = estimate(shape, recipe(tuning="full"), 4, 1024)
    off = estimate(shape, recipe(tuning="full", offload={"optimizer": True, "parameters": True}), 4, 1024)
    assert off.weights == 0 and on_card.host == 0
    moved = (on_card.weights + on_card.trainable) - (off.weights + off.trainable)
    assert off.host == pytest.approx(moved)


def test_activations_follow_checkpointing_dropout_and_dtype():
    shape = model_shape(QWEN_7B)

    def kept(**changes: Any) -> float:
        return estimate(shape, recipe(**changes), 1, 1000).activations

    plain = kept(gradient_checkpointing=False)
    assert plain == 1000 * 28 * (17 * 3584 + 8 * 18944)  # 212 kB a token and layer; 211 kB was measured
    assert kept(gradient_checkpointing=False, lora={"dropout": 0.05}) == pytest.approx(1.6 * plain)
    assert kept(gradient_checkpointing=False, dtype="float32") == 2 * plain
    assert kept() < plain / 8
    assert kept(gradient_checkpointing=False, lora={"dora": True}) > plain


def test_with_some_layers_checkpointed_a_step_computes_less_and_holds_more():
    shape = model_shape(QWEN_7B)
    kept = {n: estimate(shape, recipe(gradient_checkpointing=n), 1, 1000).activations for n in (0, 10, 28, 99)}
    none, every = (
        estimate(shape, recipe(gradient_checkpointing=asked), 1, 1000).activations for asked in (False, True)
    )
    assert kept[0] == none and kept[28] == kept[99] == every
    assert kept[10] == 1000 * (10 * 2 * 3584 + 18 * (17 * 3584 + 8 * 18944))
    speeds = [pace(shape, recipe(gradient_checkpointing=n), 1, 1000, Rates(40e12, None)).compute_s for n in (0, 10, 28)]
    assert speeds[1] == pytest.approx(speeds[0] + 10 / 28 * (speeds[2] - speeds[0]))


def test_fused_loss_holds_one_chunk_of_logits():
    shape = model_shape(QWEN_7B)
    assert estimate(shape, recipe(loss_chunk=256), 1, 4096).loss == 256 * 152064 * 8
    assert estimate(shape, recipe(loss_chunk=256), 1, 100).loss == 100 * 152064 * 8
    rows = recipe(loss_chunk=256, lora={"trainable_tokens": ("<|im_end|>",)})
    trained = recipe(loss_chunk=256, lora={"modules_to_save": ("lm_head",)})
    assert estimate(shape, rows, 1, 4096).loss == estimate(shape, trained, 1, 4096).loss
    assert estimate(shape, trained, 1, 4096).loss == 256 * 152064 * 8 + 6 * 152064 * 3584


def test_flops_a_token_are_the_published_ones():
    """s=2048: 3B 20.1, 7B 44.6, 14B 89.0 GFLOP with checkpointing, 13.6 / 30.0 / 59.9 without."""
    for read, checkpointed, without in ((QWEN_3B, 20.1, 13.6), (QWEN_7B, 44.6, 30.0), (QWEN_14B, 89.0, 59.9)):
        facts = model_shape(read).facts(recipe())
        assert flops_per_token(facts, 2048, 1.0)[1] / 1e9 == pytest.approx(checkpointed, abs=0.06)
        assert flops_per_token(facts, 2048, 0.0)[1] / 1e9 == pytest.approx(without, abs=0.06)


def test_zero3_over_ethernet_waits_for_its_gathers():
    """Four A10 at 16 Gbit/s, 14B, 2048 tokens: 43.2 GB and 26.3 s a micro-step; at 64 Gbit/s 889 tokens/s."""
    shape = model_shape(QWEN_14B)
    one = recipe(global_batch=4)
    assert micro_steps(one.global_batch, 4, one.micro_batch) == 1
    slow = pace(shape, one, 4, 2048, Rates(40e12, 1.7e9))
    assert slow.wire_gb == pytest.approx(43.2, rel=0.02)
    assert slow.step_s == pytest.approx(26.3, rel=0.03)
    fast = pace(shape, one, 4, 2048, Rates(40e12, 5.2e9))
    assert fast.step_s and 4 * 2048 / fast.step_s == pytest.approx(889, rel=0.04)


def test_gradients_are_sent_once_a_step_but_under_zero2_in_every_micro_batch():
    """Ring: (N - 1) / N of what is summed goes there and back, 4 bytes each; zero1 and 2 gather 2 bytes of weights."""
    shape, ranks = model_shape(QWEN_7B), 4

    def bytes_of(strategy: str, micro_steps: int) -> float:
        made = recipe(strategy=strategy, global_batch=ranks * micro_steps)
        sent = pace(shape, made, ranks, 2048, Rates(40e12, 1e9)).wire_gb * 1e9
        return sent / (3 / 4 * shape.facts(made).trainable)

    assert [bytes_of("zero0", count) for count in (1, 8)] == pytest.approx([8, 8])
    assert [bytes_of("zero1", count) for count in (1, 8)] == pytest.approx([8 + 2, 8 + 2])
    assert [bytes_of("zero2", count) for count in (1, 8)] == pytest.approx([8 + 2, 8 * 8 + 2])


def test_an_unknown_card_or_network_gives_no_minutes_and_one_rank_needs_no_network():
    shape = model_shape(QWEN_7B)
    assert pace(shape, recipe(), 4, 2048, Rates(None, 1e9)).minutes(10) is None
    assert pace(shape, recipe(), 4, 2048, Rates(40e12, None)).minutes(10) is None
    assert pace(shape, recipe(), 1, 2048, Rates(40e12, None)).minutes(10) is not None


@pytest.mark.parametrize(
    ("card", "flops"),
    [
        ("NVIDIA A10", 40e12),
        ("NVIDIA A10G", 42e12),
        ("NVIDIA A100-SXM4-80GB", 150e12),
        ("NVIDIA A800-SXM4-80GB", 150e12),
        ("NVIDIA GeForce RTX 4090", 102e12),
        ("NVIDIA A1000 Laptop", None),
        ("X", None),
    ],
)
def test_a_card_is_known_by_its_name(card: str, flops: float | None):
    assert sustained_flops(card) == flops


def test_a_checkpoint_holds_the_adapter_and_three_fp32_numbers_a_parameter():
    assert pace(model_shape(QWEN_14B), recipe(), 4, 2048, Rates(None, None)).checkpoint_bytes == 14 * 68_812_800


def test_lora_on_head_and_embedding_counts_its_thin_matrices_and_doras_lengths():
    shape = model_shape(QWEN_7B)
    pair = 16 * (3584 + 152064)
    for name in ("lm_head", "embed_tokens"):
        assert shape.trainable_parameters(Lora(targets=(name,))) == pair
    both = Lora(targets=("lm_head", "embed_tokens"), dora=True)
    assert shape.trainable_parameters(both) == 2 * pair + 152064 + 3584
