"""Adapters of a mixture's experts: what they are, that they compute what they say, that others read them, what they
cost, and what is refused."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from peft import PeftModel  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from tests.support import type_proof as proof  # noqa: E402
from tests.support.small_models import MIXTURES  # noqa: E402
from tests.training.node.test_types import config_of  # noqa: E402
from training.cost.memory import folded_bytes  # noqa: E402
from training.cost.strategies import STRATEGIES, cost_of  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import architecture, dpo  # noqa: E402
from training.node.adapter import merge, pipeline  # noqa: E402
from training.node.architecture import ROUTERS, expert_parameters, text_layers  # noqa: E402
from training.node.head_check import RECIPE  # noqa: E402
from training.node.model import causal_model, trainable_parameters, whole_model  # noqa: E402
from training.node.outline import model_shape  # noqa: E402
from training.recipe.reading import with_changes  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402
from training.recipe.tables import Lora  # noqa: E402
from training.run.checkpoint_files import verify_adapter  # noqa: E402
from training.text.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS  # noqa: E402
from training.text.problems import AdapterError  # noqa: E402

pytestmark = pytest.mark.torch

EXPERTS = with_changes(RECIPE, **{"lora.experts": True, "lora.experts_rank": 3, "lora.alpha": 8})
HYBRID = {"qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "granitemoehybrid", "jamba", "minimax", "nemotron_h"}
KINDS = sorted(MIXTURES.keys() | HYBRID | {"gemma4_text-experts"})
RENAMED = {"hy_v3", "nemotron_h"}
"""Whose files call shared experts or mixers otherwise than the model does: none of their adapters is merged there."""
BY_HAND = ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "glm4_moe", "qwen3_5_moe_text", "gemma4_text-experts")
IDS = torch.arange(4, 44).view(1, -1)


def adapted(kind, recipe=EXPERTS):
    torch.manual_seed(0)
    return proof.Adapted.of(config_of(kind), recipe)


def base_of(kind):
    """The model that `adapted` puts an adapter around."""
    torch.manual_seed(0)
    return architecture.build(config_of(kind)).float()


def logits(model):
    """Of one sample, by transformers' own attention; a loss may be in the head's place."""
    causal = causal_model(model)
    causal.set_attn_implementation("eager")
    with torch.no_grad():
        hidden = architecture.text_part(causal.eval())(input_ids=IDS, use_cache=False).last_hidden_state
        return hidden @ causal.get_output_embeddings().weight.T


def experts_of(model):
    """The stacks of the model's experts, by name."""
    inside = {id(p) for layer in text_layers(model) for p in expert_parameters(layer).values()}
    return {name: p for name, p in model.named_parameters() if id(p) in inside}


@pytest.mark.parametrize("kind", KINDS)
def test_all_experts_learn_beside_what_learns_without_them_and_no_router_does(kind):
    plain, small = adapted(kind, RECIPE), adapted(kind)
    batch = proof.inputs(proof.collate([small.samples], 0, "packed"), "cpu")
    small.loss(**batch)[0].backward()
    trained = trainable_parameters(small.model)
    added = trained.keys() - trainable_parameters(plain.model).keys()
    stacks = experts_of(plain.model.get_base_model())
    assert len(added) == 2 * len(stacks) > 0 and all(".experts." in name for name in added)
    assert not any(ROUTERS & set(name.split(".")) for name in trained)
    assert [name for name, p in trained.items() if p.grad is None or not p.grad.abs().sum() > 0] == []
    config = small.model.peft_config["default"]
    asked = set(config.target_parameters)
    assert all(any(name.endswith(f".{one}") for one in asked) for name in stacks) and "gate" not in asked


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_the_outline_counts(kind):
    shape = model_shape(config_of(kind))
    for recipe in (EXPERTS, with_changes(EXPERTS, **{"lora.experts_rank": None, "lora.rslora": True})):
        small = adapted(kind, recipe)
        assert shape.facts(recipe).trainable == sum(p.numel() for p in trainable_parameters(small.model).values())
    stacks = sum(p.numel() for p in experts_of(causal_model(adapted(kind, RECIPE).model)).values())
    assert sum(layer.experts * count for layer, count in shape.each) == stacks


def by_hand(p, a, b, scale, transposed):
    """What a pair adds to a matrix, or to each expert's: 3 rows of A, and every so many-th column of B."""
    if p.dim() == 2:
        return scale * b @ a
    each = [scale * b[:, expert :: len(p)] @ a[3 * expert : 3 * expert + 3] for expert in range(len(p))]
    return torch.stack([product.T if transposed else product for product in each])


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", BY_HAND)
def test_each_expert_has_its_own_product_added(kind, rslora):
    recipe = with_changes(EXPERTS, **{"lora.rslora": rslora})
    small = adapted(kind, recipe)
    right = logits(small.model)
    trained = {name: p.detach() for name, p in trainable_parameters(small.model).items()}
    plain = base_of(kind)
    scales = {rank: recipe.lora.alpha / (rank**0.5 if rslora else rank) for rank in (3, recipe.lora.rank)}
    for name, p in plain.named_parameters():
        path, _, last = f"base_model.model.{name}".rpartition(".")
        inner = ".base_layer" if last == "gate_up_proj" else ""
        pair = [trained.get(f"{path}{inner}.lora_{side}.weight") for side in "AB"]
        if pair[0] is not None and "bias" not in last:
            p.data += by_hand(p, *pair, scales[3 if p.dim() == 3 else recipe.lora.rank], kind == "gpt_oss")
    assert proof.relative(logits(plain), right) < 1e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base model of a type and an adapter of its experts, in files."""
    folder, made = tmp_path_factory.mktemp("experts"), {}

    def of(kind):
        if kind not in made:
            base_of(kind).save_pretrained(folder / kind / "base")
            adapted(kind, EXPERTS).model.save_pretrained(folder / kind / "run" / "adapter")
            made[kind] = folder / kind / "base", folder / kind / "run" / "adapter"
        return made[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_the_adapter_again_and_merges_the_same_and_so_does_our_merge_of_files(kind, saved, tmp_path):
    base, adapter = saved(kind)
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain)
    loaded = PeftModel.from_pretrained(plain, adapter)
    right = logits(loaded)
    assert proof.relative(before, right) > 0.1
    assert proof.relative(logits(adapted(kind, EXPERTS).model), right) < 1e-5
    assert proof.relative(logits(loaded.merge_and_unload()), right) < 1e-5
    verify_adapter(adapter / ADAPTER_WEIGHTS, json.loads((adapter / ADAPTER_CONFIG).read_text()))
    if kind in RENAMED:
        with pytest.raises(AdapterError, match="is not for this model, which has no"):
            merge.merge(base, adapter, tmp_path / "merged")
        assert not list(tmp_path.iterdir())
        return
    merge.merge(base, adapter, tmp_path / "merged")
    assert proof.relative(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), right) < 1e-5


def test_experts_that_lie_in_files_otherwise_are_named_before_anything_is_written(saved, tmp_path, monkeypatch):
    base, adapter = saved("qwen3_moe")
    monkeypatch.setattr("training.node.adapter.weights._stacks", lambda converter: False)
    with pytest.raises(AdapterError, match=r"changes experts, model\.layers\.0\..*not merged here; .*fab generate"):
        merge.merge(base, adapter, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_an_adapter_of_other_experts_is_refused(saved, tmp_path):
    (base, _), (_, others) = saved("qwen3_moe"), saved("flex_olmo")
    with pytest.raises(AdapterError, match=r"does not fit this model: model\.layers\.0\.mlp\.experts\.0"):
        merge.merge(base, others, tmp_path / "merged")
    (dense, _) = saved("mixtral")
    with pytest.raises(AdapterError, match="is not for this model, which has no"):
        merge.merge(dense, saved("granitemoe")[1], tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_experts_that_zero3_keeps_in_parts_are_experts_all_the_same():
    """Else nothing would be adapted, and PEFT would be given the names of shared experts, which mean all experts."""
    model = base_of("deepseek_v2")
    names = architecture.adapted(model)
    for p in model.parameters():
        p.ds_shape, p.data = p.shape, torch.empty(0)
    assert len(architecture.adapted_experts(model)) == 2
    assert architecture.adapted(model) == names
    assert set(names) - set(architecture.left_by_peft(model, names)) == {"down_proj", "gate_proj", "up_proj"}


def test_the_reference_of_pairs_is_the_model_without_the_experts_adapter():
    small = adapted("qwen3_moe")
    with dpo.AdapterSwitch(small.model).off():
        off = small.hidden(small.samples)
    assert proof.relative(off, small.hidden(small.samples)) > 0.1
    base = small.model.unload()
    assert torch.equal(proof.Adapted(base, proof.LossModel(base, EXPERTS), small.samples).hidden(small.samples), off)


def test_a_rank_of_its_own_or_what_is_left_of_the_others_by_token():
    assert [Lora(rank=rank).rank_of_experts(8) for rank in (4, 16, 32)] == [1, 2, 4]
    assert Lora(rank=16, experts=True, experts_rank=5).rank_of_experts(8) == 5


def test_the_plan_counts_folded_experts_and_their_gradient():
    """Of Qwen3-30B-A3B: 1.2 GB a layer, as much for the gradient, and all layers' where none is computed again."""
    more = {"num_hidden_layers": 48, "hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128}
    shape = model_shape(AutoConfig.for_model("qwen3_moe", moe_intermediate_size=768, **more))
    layer = 2 * 128 * 3 * 2048 * 768
    plain = with_changes(RECIPE, strategy="zero2")
    experts = with_changes(plain, **{"lora.experts": True})
    for again, folds in ((True, 2), (False, 49), (40, 9)):
        recipe = with_changes(experts, gradient_checkpointing=again)
        assert folded_bytes(shape, recipe, recipe.checkpointed(48)) == folds * layer
        added = [
            cost_of(each).memory(shape, with_changes(each, gradient_checkpointing=again), 4, 2048).gathered
            for each in (plain, experts)
        ]
        assert added[1] - added[0] == folds * layer
    stages = with_changes(experts, strategy="pipeline", micro_batch=1, gradient_checkpointing=True)
    of_stages = STRATEGIES["pipeline"].memories(shape, stages, 4, 2048)
    assert [memory.gathered for memory in of_stages] == [2 * layer] * 4
    kept = with_changes(stages, gradient_checkpointing=False)
    assert STRATEGIES["pipeline"].memories(shape, kept, 4, 2048)[3].gathered == 13 * layer
    assert shape.facts(experts).folded == 48 * 8 * 3 * 2048 * 768 and shape.facts(plain).folded == 0


REFUSED = [
    ("qwen3", {"lora.experts": "true"}, "lora.experts: a qwen3 model has no experts"),
    ("qwen3_moe", {"lora.experts": "true", "tuning": "full"}, "routers of a qwen3_moe would drift"),
]


@pytest.mark.parametrize(("kind", "settings", "said"), REFUSED)
def test_what_no_model_can_do_is_refused_by_the_plan_and_on_the_node(kind, settings, said, tmp_path):
    config_of(kind).save_pretrained(tmp_path / "model")
    recipe = load_recipe("tiny", {"lora.dropout": "0"} | settings)
    assert said in cost_of(recipe).misfit(model_shape(config_of(kind)), recipe, 1)
    with pytest.raises(RecipeError, match=said):
        whole_model(recipe, tmp_path / "model")


def test_where_nobody_asked_the_plan_a_model_without_experts_is_refused_all_the_same():
    with pytest.raises(RecipeError, match=r"lora\.experts: qwen3 has no experts; leave it out"):
        adapted("qwen3")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora.experts_rank": "4"}, "lora.experts_rank = 4 needs lora.experts = true"),
        ({"lora.experts": "true", "lora.dropout": "0.1"}, "has no dropout in PEFT; take lora.dropout = 0"),
        ({"lora.experts": "true", "lora.dora": "true"}, "cannot be a DoRA in PEFT; take lora.dora = false"),
        ({"lora.experts": "true", "lora.experts_rank": "0"}, "lora.experts_rank: at least 1 is expected, not 0"),
        ({"lora.experts": "true", "lora.experts_rank": "many"}, "a whole number is expected, not 'many'"),
        ({"lora.experts": "some"}, "lora.experts: true or false is expected, not 'some'"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused_in_a_sentence(settings, said):
    with pytest.raises(RecipeError) as refused:
        load_recipe("tiny", {"lora.dropout": "0"} | settings)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_each_rank_of_a_spread_model_has_the_pairs_of_its_own_experts(saved, monkeypatch):
    base, adapter = saved("qwen3_moe")
    monkeypatch.setattr(pipeline.Voice, "of", lambda folder: None)
    whole = dict(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).named_parameters())
    for rank in (0, 1):
        stage = pipeline.AnswerStage(base, adapter, rank, 2, torch.device("cpu"))
        pairs = {name: p for name, p in stage.model.named_parameters() if ".experts." in name and ".lora_" in name}
        assert len(pairs) == 4
        for name, p in pairs.items():
            assert torch.equal(p, whole[name.replace(".layers.0.", f".layers.{rank}.")])


@pytest.mark.parametrize("again", [False, True])
def test_what_autograd_keeps_of_folded_experts_is_what_the_plan_counts(again):
    """Beside the base's own stacks; the plan adds a layer's for what one layer needs while it works."""
    recipe = with_changes(EXPERTS, gradient_checkpointing=again, dtype="float32")
    small, shape = adapted("qwen3_moe", recipe), model_shape(config_of("qwen3_moe"))
    base = {p.untyped_storage().data_ptr() for p in small.model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.dim() == 3 and len(tensor) == 4 and storage.data_ptr() not in base:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = proof.inputs(proof.collate([small.samples], 0, "packed"), "cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = small.loss(**batch)[0]
    layer = 4 * shape.largest.experts
    folds = sum(nbytes for nbytes in kept.values() if nbytes >= layer / 3)  # the smaller of both, down_proj's
    assert folds == (0 if again else 2 * layer) and loss.requires_grad
    assert folded_bytes(shape, recipe, recipe.checkpointed(2)) == (2 if again else 3) * layer
