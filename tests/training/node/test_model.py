"""The model as it is made ready to train: what is trainable, what is refused, what is counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support import tiny_adapter  # noqa: E402
from tests.support.llama_shape import model_shape  # noqa: E402
from training.cost.memory import DROPOUT, offloaded_bytes, saved_bytes  # noqa: E402
from training.cost.shape import ModelFacts  # noqa: E402
from training.cost.strategies import STRATEGIES, ZERO3  # noqa: E402
from training.cost.zero import BUCKET  # noqa: E402
from training.data.collate import collate  # noqa: E402
from training.data.sample import IGNORED, Sample  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe, recipe_names  # noqa: E402
from training.node import model  # noqa: E402
from training.node.outline import shape_of_folder  # noqa: E402
from training.node.strategies import machine  # noqa: E402
from training.node.strategies.registry import ENGINES  # noqa: E402
from training.node.strategies.zero import ds_config, persistence_threshold  # noqa: E402
from training.recipe import model_types as types  # noqa: E402
from training.recipe.recipe import Recipe, RecipeError  # noqa: E402
from training.recipe.strategy_rules import PARTITIONED  # noqa: E402
from training.recipe.tables import Lora  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write_model(path, steps=1)
    return path


def _loaded(folder, **overrides):
    return model.load(load_recipe("tiny", {key.replace("__", "."): v for key, v in overrides.items()}), folder)


def _batch(batching="packed"):
    samples = [Sample(list(range(5, 5 + n)), list(range(5, 5 + n))) for n in (4, 9)]
    return collate([samples], 0, batching)


@pytest.mark.parametrize(
    ("asked", "checkpointed"), [("true", 4), ("false", 0), ("0", 0), ("1", 1), ("3", 3), ("99", 4)]
)
def test_a_number_says_how_many_of_the_first_layers_are_checkpointed(folder, asked, checkpointed):
    loaded = _loaded(folder, gradient_checkpointing=asked)
    layers = model.causal_model(loaded).get_decoder().layers
    assert [layer.gradient_checkpointing for layer in layers] == [n < checkpointed for n in range(4)]


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_gradients_reach_the_adapter_through_checkpointed_layers_behind_a_frozen_embedding(folder, batching):
    loaded = _loaded(folder, batching=batching, dtype="float32")
    recipe = load_recipe("tiny", {"batching": batching})
    layers = model.causal_model(loaded).get_decoder().layers
    assert all(layer.gradient_checkpointing for layer in layers)
    assert layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}
    assert not model.causal_model(loaded).get_input_embeddings().weight.requires_grad
    sums = model.LossModel(loaded, recipe)(**model.inputs(_batch(batching), "cpu"))
    sums[0].backward()
    got = {name: p.grad for name, p in model.trainable_parameters(loaded).items()}
    assert got and all(grad is not None and grad.isfinite().all() for grad in got.values())
    assert all(grad.any() for name, grad in got.items() if "lora_B" in name), "A's gradient is zero while B is"


def test_adapters_have_the_recipes_precision_and_the_same_first_values_whatever_came_before(folder):
    one = model.trainable_parameters(_loaded(folder))
    torch.rand(1000)
    two = model.trainable_parameters(_loaded(folder))
    assert {p.dtype for p in one.values()} == {torch.bfloat16}
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[n], p) for n, p in model.trainable_parameters(_loaded(folder, seed="1")).items())


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora.dora": "true"}, {"lora.targets": '["q_proj", "embed_tokens"]'}],
    ids=["lora", "dora", "an embedding's"],
)
def test_half_of_the_layers_alone_get_the_adapter_values_they_have_in_the_whole(folder, settings):
    from transformers import AutoModelForCausalLM

    recipe = load_recipe("tiny", settings)
    whole = model.trainable_parameters(model.load(recipe, folder))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    base.model.layers[0], base.model.layers[1] = torch.nn.Identity(), torch.nn.Identity()
    half = model.trainable_parameters(model.trainable(base, recipe, folder))
    missing = {name.split(".layers.")[1][0] for name in whole.keys() - half.keys()}
    assert half.keys() < whole.keys() and missing == {"0", "1"}
    assert model.whole_model(recipe, folder).shapes.keys() == whole.keys(), "whatever a rank holds"
    assert all(torch.equal(half[name], whole[name]) for name in half)
    drawn = [p for name, p in half.items() if "lora_A.weight" in name]
    assert len({tuple(p.flatten()[:9].tolist()) for p in drawn}) == len(drawn), "each module has values of its own"


def test_an_adapters_first_values_are_the_same_in_every_precision_but_for_rounding(folder):
    exact = model.trainable_parameters(_loaded(folder, dtype="float32"))
    rounded = model.trainable_parameters(_loaded(folder, dtype="bfloat16"))
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


def test_the_key_value_cache_is_off_in_training_and_on_in_what_is_saved(folder, tmp_path):
    loaded = _loaded(folder, tuning="full")
    assert loaded.config.use_cache is False
    model.config_writer(loaded)(tmp_path)
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(tmp_path).use_cache is True


@pytest.fixture(scope="module")
def never_ended(folder, tmp_path_factory):
    """A base model of which embedding and head are two, and the rows of the turns' tokens were never trained."""
    from transformers import AutoModelForCausalLM

    base = tiny_adapter.write_variant(folder, tmp_path_factory.mktemp("never") / "base", tied=False)
    untied = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for end in (untied.get_input_embeddings(), untied.get_output_embeddings()):
            end.weight[model.token_rows(TURNS, base)] = 1e-6
    untied.save_pretrained(base)
    return base


TURNS = ("<|im_start|>", "<|im_end|>")
ROWS, EMBEDDING = {"lora.trainable_tokens": json.dumps(TURNS)}, {"lora.modules_to_save": '["embed_tokens"]'}


@pytest.mark.parametrize(("settings", "learned"), [(ROWS, True), (EMBEDDING, False)])
def test_a_base_model_learns_to_end_its_turn_where_the_heads_row_is_trained(never_ended, settings, learned):
    recipe = load_recipe("tiny", {"dtype": "float32", "lora.dropout": "0", "strategy": "zero0"} | settings)
    loaded = model.load(recipe, never_ended)
    start, end = model.token_rows(TURNS, never_ended)
    turns = [[start, 50 + n, 60 + n, end, start, 70 + n, 80 + n, end] for n in range(6)]
    answers, ends = ([Sample(turn, [IGNORED] * cut + turn[cut:]) for turn in turns] for cut in (5, 7))
    batch, last = (model.inputs(collate([samples], 0, "packed"), "cpu") for samples in (answers, ends))
    fused = model.LossModel(loaded, recipe)
    optimizer = torch.optim.AdamW([p for p in loaded.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(8):
        (fused(**batch)[0] / 18).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert fused(**last)[1].item() == (6 if learned else 0)
    assert any("lm_head" in name for name in model.trainable_parameters(loaded)) == learned


def test_token_rows_beside_a_lora_of_the_head_that_shares_them_are_refused(folder):
    with pytest.raises(RecipeError, match="shares its embedding with the head; change lm_head or the tokens"):
        _loaded(folder, lora__targets='["lm_head"]', lora__trainable_tokens='["<|im_end|>"]')
    with pytest.raises(RecipeError, match="shares its embedding with the head; change lm_head or the tokens"):
        _loaded(folder, lora__modules_to_save='["model.embed_tokens"]', lora__trainable_tokens='["<|im_end|>"]')


def test_a_type_that_is_never_trained_is_refused_padded_too(folder, monkeypatch):
    monkeypatch.setitem(types.UNTRAINABLE, "qwen2", "its adapter is lost")
    with pytest.raises(RecipeError, match=r"^tiny: a qwen2 is not trained: its adapter is lost"):
        _loaded(folder, batching="padded")


def test_packed_rows_are_isolated_by_their_positions_and_never_by_a_mask(folder):
    packed = model.inputs(_batch(), "cpu")
    assert packed["attention_mask"] is None and packed["segments"].lengths == (4, 9)
    padded = model.inputs(_batch("padded"), "cpu")
    assert padded["segments"] is None and padded["attention_mask"].sum() == 13
    ours = model.LossModel(_loaded(folder, dtype="float32"), load_recipe("tiny"))(**packed)
    theirs = model.LossModel(
        _loaded(folder, dtype="float32", batching="padded"), load_recipe("tiny", {"batching": "padded"})
    )(**padded)
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-6)


def test_a_target_a_saved_module_or_a_token_the_model_lacks_is_named_with_what_it_has(folder):
    with pytest.raises(RecipeError, match=r"lora.targets: tiny has no module w1; it has .*down_proj.*q_proj"):
        _loaded(folder, lora__targets='["q_proj", "w1"]')
    with pytest.raises(RecipeError, match=r"lora.modules_to_save: tiny has no module head"):
        _loaded(folder, lora__modules_to_save='["head"]')
    with pytest.raises(RecipeError, match=r"lora.trainable_tokens: tiny has no token <\|im_stop\|>"):
        _loaded(folder, lora__trainable_tokens='["<|im_end|>", "<|im_stop|>"]')


@pytest.mark.parametrize(("layer", "refused"), [("lm_head", True), ("k_proj", True), ("q_proj", False)])
def test_a_dora_of_rows_without_a_length_is_refused_and_not_trained_to_no_number(folder, tmp_path, layer, refused):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        base.lm_head.weight[7] = base.model.layers[3].self_attn.k_proj.weight[2] = 0
    base.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    recipe = load_recipe("tiny", {"lora.targets": json.dumps([layer]), "lora.dora": "true"})
    with pytest.raises(RecipeError) if refused else nullcontext():
        sums = model.LossModel(model.load(recipe, tmp_path), recipe)(**model.inputs(_batch(), "cpu"))
        assert sums.isfinite().all()


@pytest.mark.parametrize(
    ("targets", "saved", "key"),
    [
        (["layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj"], [], "targets"),
        (["self_atn.q_proj", "v_proj"], [], "targets"),
        (["mlp", "v_proj"], [], "targets"),
        (["input_layernorm", "v_proj"], [], "targets"),
        (["layers"], [], "targets"),
        (["v_proj", "q_proj"], ["self_attn"], "targets"),
        (["v_proj"], ["layers.9.mlp.gate_proj"], "modules_to_save"),
        (["v_proj"], ["layers"], "modules_to_save"),
        (["v_proj"], ["act_fn"], "modules_to_save"),
    ],
)
def test_a_name_of_no_module_or_of_one_that_cannot_be_trained_so_is_refused_by_its_key(folder, targets, saved, key):
    settings = {"lora.targets": json.dumps(targets), "lora.modules_to_save": json.dumps(saved)}
    with pytest.raises(RecipeError, match=rf"^lora\.{key}: "):
        model.whole_model(load_recipe("tiny", settings), folder)


def test_a_path_means_the_modules_that_end_so_and_the_plan_counts_no_fewer(folder):
    targets, saved = ["layers.1.self_attn.q_proj", "v_proj"], ["norm", "layers.2.mlp.gate_proj"]
    recipe = load_recipe("tiny", {"lora.targets": json.dumps(targets), "lora.modules_to_save": json.dumps(saved)})
    whole = model.whole_model(recipe, folder)
    trained = {re.sub(r"(\.lora_.)?\.weight$", "", name) for name in whole.shapes}
    values = {f"layers.{number}.self_attn.v_proj" for number in range(4)}
    assert trained == {f"base_model.model.model.{path}" for path in values | {targets[0], *saved}}
    config = json.loads((folder / "config.json").read_text())
    assert model_shape(config).facts(recipe).trainable + 128 >= whole.facts.trainable, "but for the norm"


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_model_is_counted_without_loading_it(folder, tuning):
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(folder)
    recipe = load_recipe("tiny", {"tuning": tuning})
    loaded = _loaded(folder, tuning=tuning)
    facts = model.whole_model(recipe, folder).facts
    assert facts.trainable == sum(p.numel() for p in loaded.parameters() if p.requires_grad)
    layer = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 384
    assert facts.matmul_parameters == 4 * layer + shape.vocab_size * 128, "the tied embedding is the head"
    assert (facts.layers, facts.attends, facts.full) == (4, ((0, 4 * 128),), tuning == "full")


@pytest.mark.parametrize(
    "settings",
    [
        {"tuning": "full"},
        {"lora.rank": "4", "lora.dora": "true"},
        {"lora.targets": '["q_proj", "down_proj"]', "lora.modules_to_save": '["lm_head"]'},
        {"lora.modules_to_save": '["model.embed_tokens"]'},
        {"lora.trainable_tokens": '["<|im_end|>"]'},
    ],
    ids=["full", "dora", "a whole head", "an embedding by its path", "a token's row"],
)
def test_the_plan_reckons_from_config_json_what_the_engine_counts(folder, settings):
    recipe = load_recipe("tiny", settings)
    config = json.loads((folder / "config.json").read_text())
    whole = model.whole_model(recipe, folder)
    assert model_shape(config).facts(recipe) == whole.facts
    trained = model.trainable_parameters(model.load(recipe, folder))
    assert whole.shapes == {name: p.shape for name, p in trained.items()}
    assert sum(shape.numel() for shape in whole.shapes.values()) == whole.facts.trainable


def test_a_recipe_can_name_each_strategy_that_has_a_cost_and_an_engine():
    named = get_args(Recipe.model_fields["strategy"].annotation)
    assert set(named) == STRATEGIES.keys() == ENGINES.keys()
    assert {name for name, cost in STRATEGIES.items() if cost.STAGE == 3} == PARTITIONED


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name.startswith("zero")])
def test_deepspeed_is_told_what_the_plan_reckons_with(strategy):
    buckets = {trained: ds_config(load_recipe("tiny", {"strategy": strategy}), 2, trained) for trained in (9, 10**9)}
    zero = buckets[9]["zero_optimization"]
    assert (f"zero{zero['stage']}", zero["reduce_bucket_size"]) == (strategy, 9)
    assert buckets[10**9]["zero_optimization"]["reduce_bucket_size"] == BUCKET
    shares, stage = STRATEGIES[strategy].shares(2), zero["stage"]
    assert [shares.optimizer == 2, shares.gradients == 2, shares.weights == 2] == [stage >= 1, stage >= 2, stage >= 3]


def test_under_zero3_every_lora_matrix_stays_resident(folder):
    for rank in (8, 64):
        recipe = load_recipe("tiny", {"lora.rank": str(rank)})
        loaded = model.load(recipe, folder)
        largest = max(p.numel() for p in model.trainable_parameters(loaded).values())
        assert largest < persistence_threshold(recipe, shape_of_folder(folder)) < 128 * 384 * 2


def test_gradients_cross_in_fp32_and_a_decoder_layer_is_gathered_at_once(folder):
    config = ds_config(load_recipe("tiny"), 2, 9)
    assert config["communication_data_type"] == "fp32" and config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["bf16"] == {"enabled": True}
    leaves = [m for m in _loaded(folder).modules() if getattr(m, "_z3_leaf", False)]
    assert [type(leaf).__name__ for leaf in leaves] == ["Qwen2DecoderLayer"] * 4


def _kept_by_a_layer(folder, **settings):
    """Bytes that one decoder layer keeps for its backward, weights aside."""
    recipe = load_recipe("tiny", {"gradient_checkpointing": "false", "lora.rank": "8"} | settings)
    loaded = model.load(recipe, folder)
    weights = {p.untyped_storage().data_ptr() for p in loaded.parameters()}
    layer, kept = model.causal_model(loaded).get_decoder().layers[1], {}

    def keep(tensor):
        place = tensor.untyped_storage()
        if place.data_ptr() not in weights:
            kept[place.data_ptr()] = place.nbytes(), tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    layer.register_forward_pre_hook(lambda *_: hooks.__enter__())
    layer.register_forward_hook(lambda *_: hooks.__exit__(None, None, None))
    batch = collate([[Sample(list(range(5, 205)), [7] * 200)]], 0, "packed")
    model.LossModel(loaded, recipe)(**model.inputs(batch, "cpu"))
    return sum(size for size, _ in kept.values())


def test_dropout_is_off_unless_asked_for_since_it_keeps_two_thirds_more_activations(folder):
    assert Lora().dropout == 0.0 and {load_recipe(n).lora.dropout for n in recipe_names() if n != "tiny"} == {0.0}
    kept, with_dropout = (_kept_by_a_layer(folder, **{"lora.dropout": share}) for share in ("0.0", "0.05"))
    print(f"bytes a token: {kept / 200:.0f} without dropout, {with_dropout / 200:.0f} with it")
    assert with_dropout == pytest.approx(DROPOUT * kept, rel=0.15), "what the plan reckons with"


def test_a_card_the_wheel_has_no_code_for_is_refused_with_both_figures():
    wheel = ["sm_75", "sm_90", "compute_90"]
    said = r"Tesla V100 has compute capability 7\.0; torch .* was built for sm_75, sm_90, compute_90"
    with pytest.raises(RecipeError, match=said):
        machine.refuse_old_card("Tesla V100", (7, 0), wheel)
    machine.refuse_old_card("Tesla T4", (7, 5), wheel)
    machine.refuse_old_card("a card of next year", (13, 0), wheel)  # its driver compiles the PTX


CONFIGURED = """
import json, sys
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from training.recipe.recipe import Recipe
from training.node.strategies.zero import ds_config
for line in sys.stdin:
    recipe = Recipe.model_validate_json(line)
    made = ds_config(recipe, 1, 9)
    read, zero = DeepSpeedConfig(made), DeepSpeedConfig(made).zero_config
    print(json.dumps([
        get_accelerator().device_name(), f"zero{zero.stage}", read.gradient_clipping,
        bool(zero.offload_optimizer and zero.offload_optimizer.pin_memory),
        bool(zero.offload_param and zero.offload_param.pin_memory),
        read.float16_config.enabled, read.bfloat16_config.enabled, read.gradient_accumulation_steps,
    ]))
"""


def test_deepspeed_reads_every_strategys_configuration_for_cuda_as_it_is_meant():
    cases = [
        {"strategy": stage, "dtype": dtype, "offload.optimizer": off, "offload.parameters": both}
        for stage in ("zero1", "zero2", "zero3")
        for dtype in ("bfloat16", "float16", "float32")
        for off, both in (("false", "false"), ("true", "false"), ("true", "true"))
        if both == "false" or stage == "zero3"
    ]
    recipes = [load_recipe("tiny", case) for case in cases]
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURED],
        input="".join(recipe.model_dump_json() + "\n" for recipe in recipes),
        env=os.environ | {"DS_ACCELERATOR": "cuda", "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert rows == [
        [
            "cuda",
            recipe.strategy,
            recipe.optimizer.grad_clip,
            recipe.offload.optimizer,
            recipe.offload.parameters,
            recipe.dtype == "float16",
            recipe.dtype == "bfloat16",
            recipe.global_batch // recipe.micro_batch,
        ]
        for recipe in recipes
    ]


def test_fp16_is_refused_without_a_card_that_needs_it():
    if torch.cuda.is_available():
        pytest.skip("speaks of machines without a GPU")
    with pytest.raises(RecipeError, match="float16 needs a GPU; without one take bfloat16 or float32"):
        machine.check_dtype(load_recipe("tiny", {"dtype": "float16"}))
    machine.check_dtype(load_recipe("tiny"))


def test_token_rows_of_a_partitioned_embedding_are_refused_where_peft_cannot_hand_them_around():
    if torch.cuda.is_available():
        pytest.skip("speaks of machines without a GPU")
    tokens = {"lora.trainable_tokens": '["<|im_end|>"]'}
    with pytest.raises(RecipeError, match="zero3 need a GPU; without one take strategy zero2"):
        machine.check_strategy(load_recipe("tiny", tokens))
    machine.check_strategy(load_recipe("tiny", tokens | {"strategy": "zero2"}))


def test_offloading_more_than_the_nodes_ram_is_refused_with_both_figures(folder, monkeypatch):
    recipe = load_recipe("tiny", {"offload.optimizer": "true", "offload.parameters": "true"})
    machine.check_host_ram(recipe, folder, 2)
    facts = ModelFacts(parameters=14_000_000_000, trainable=100_000_000, matmul_parameters=13_000_000_000)
    assert offloaded_bytes(facts, recipe, ZERO3.shares(4)) == (28_000_000_000 + 1_600_000_000) // 4
    monkeypatch.setattr(machine, "available_ram", lambda: 1_000_000)
    with pytest.raises(RecipeError, match=r"offload.optimizer and offload.parameters need .*B .*, \d.*B are available"):
        machine.check_host_ram(recipe, folder, 2)
    machine.check_host_ram(load_recipe("tiny"), folder, 2)
    full = load_recipe("tiny", {"tuning": "full"})
    assert saved_bytes(facts, full) == 12 * facts.trainable and saved_bytes(facts, recipe) == 0
    with pytest.raises(RecipeError, match="saving with tuning = full needs"):
        machine.check_host_ram(full, folder, 2)
    monkeypatch.setenv("RANK", "1")  # of another node than the head's
    machine.check_host_ram(full, folder, 2)
