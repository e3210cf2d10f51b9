"""Every type of model that is admitted passes every proof, on a small model of its own; docs/models.md says so."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from transformers import AutoConfig  # noqa: E402

from tests.support import type_proof as proof  # noqa: E402
from tests.support.models_page import shown  # noqa: E402
from tests.support.small_models import DENSE, HYBRIDS, MIXTURES, SMALL, TRIED, TYPES, VARIANTS, WRAPPERS  # noqa: E402
from tests.support.type_proof import LIMIT, proved  # noqa: E402
from training.cost.shape import PlanError  # noqa: E402
from training.cost.strategies import cost_of  # noqa: E402
from training.data.collate import collate  # noqa: E402
from training.data.sample import Sample  # noqa: E402
from training.models.folder import TENSORS, described, read_config  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import architecture, attention, base_weights, head_check, loss, mixers  # noqa: E402
from training.node.architecture import adapted, expert_parameters, text_layers  # noqa: E402
from training.node.known_outline import known_outline  # noqa: E402
from training.node.model import LossModel, inputs, trainable, whole_model  # noqa: E402
from training.node.outline import model_shape, shape_of_folder  # noqa: E402
from training.recipe import model_types as types  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402
from training.text.problems import AdapterError  # noqa: E402

pytestmark = pytest.mark.torch


def config_of(kind, **changes):
    """Of a type, or of a variant of one."""
    settings = {"model_type": kind} | deepcopy(TRIED[kind]) | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoConfig.for_model(**settings)


def test_what_is_admitted_is_what_is_tried():
    tried = {"DENSE": DENSE, "MIXTURES": MIXTURES, "HYBRIDS": HYBRIDS, "WRAPPERS": WRAPPERS}
    for group, kinds in tried.items():
        assert sorted(getattr(types, group)) == sorted(kinds)
    assert len(types.ADMITTED) == len(TYPES) >= 25 and len(MIXTURES) >= 8 and len(HYBRIDS) >= 4
    assert {variant["model_type"] for variant in VARIANTS.values()} <= types.ADMITTED


@pytest.mark.parametrize("kind", sorted(TRIED))
def test_every_type_passes_every_proof(kind):
    config = config_of(kind)
    found = proved(config)
    assert all(value < LIMIT for value in found.values()), found
    assert {"zero3", *found} == {name for name, passed in shown(config.model_type).items() if passed}


@pytest.mark.parametrize("kind", [*sorted(TRIED), "opt"])
def test_nothing_that_a_config_sets_acts_by_chance_in_training(kind):
    """OPT, which is not admitted, leaves out layers, and has dropout in a layer's own forward."""
    batching = "padded" if kind == "opt" else "packed"
    own = SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64}
    config = AutoConfig.for_model(kind, **own) if kind == "opt" else config_of(kind)
    text = config.get_text_config()
    for key in (key for key in text.to_dict() if "drop" in key or "jitter" in key):
        setattr(text, key, 0.3)
    base = architecture.build(config, attn_implementation=attention.SEGMENTS if batching == "packed" else "eager")
    recipe = proof.RECIPE.model_copy(update={"batching": batching})
    learns = LossModel(trainable(base, recipe, Path(kind)), recipe)
    samples = [Sample(one, one) for one in ([5, 6, 7, 8, 9, 10, 11], [12, 13, 14])]
    batch = inputs(collate([samples], 0, batching), "cpu")
    first, again = (learns.train()(**batch).detach() for _ in range(2))
    with torch.no_grad():
        assert torch.equal(first, again) and torch.equal(first, learns.eval()(**batch))


def _small(kind, **changes):
    torch.manual_seed(0)
    return architecture.build(config_of(kind, **changes))


@pytest.mark.representatives
@pytest.mark.parametrize("kind", sorted(TRIED))
def test_every_type_is_read_back_as_it_was_saved_and_weights_that_are_not_its_own_are_refused(kind, tmp_path):
    _small(kind).save_pretrained(tmp_path)
    base_weights.check_weights_match_config(tmp_path)
    assert known_outline(read_config(tmp_path)) is None
    assert shape_of_folder(tmp_path) == model_shape(config_of(kind))
    assert head_check.difference(tmp_path, "packed").worst < LIMIT
    shapes = described(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(shapes)
    layer = next(name for name in names if ".layers.0." in name and "vision" not in name and "audio" not in name)
    others = {
        **{f"not {name}": {n: shape for n, shape in shapes.items() if n != name} for name in names[:: len(names) // 3]},
        "a prefix": {f"_orig_mod.{name}": shape for name, shape in shapes.items()},
        "wider": shapes | {layer: [size + 1 for size in shapes[layer]]},
        "in a layer": shapes | {f"{layer.partition('.0.')[0]}.0.extra.weight": [4]},
        "one layer more": shapes | {f"{layer.partition('.0.')[0]}.99.norm.weight": [4]},
    }
    for what, other in others.items():
        (tmp_path / TENSORS).write_text(json.dumps(other))
        with pytest.raises(AdapterError, match=r"the files (lack|hold)|its weights are not read as"):
            base_weights.check_weights_match_config(tmp_path)
            pytest.fail(what)
    (tmp_path / TENSORS).write_text(json.dumps(shapes | {"mtp.norm.weight": [4]}))
    base_weights.check_weights_match_config(tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "falcon"])
def test_a_type_whose_parts_have_other_names_is_refused_by_its_name(kind, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=f"models of type {kind} are not supported"):
        shape_of_folder(tmp_path)


@pytest.mark.parametrize("kind", sorted(MIXTURES.keys() | VARIANTS))
def test_a_mixture_has_experts_that_are_left_alone_with_their_routers(kind):
    model = _small(kind)
    assert any(expert_parameters(layer) for layer in text_layers(model))
    assert not any("expert" in name.replace("shared_expert", "") or "router" in name for name in adapted(model))


@pytest.mark.parametrize("kind", sorted(HYBRIDS))
def test_a_hybrid_mixes_tokens_otherwise_than_by_attention_and_leaks_unless_that_is_kept_apart(kind, monkeypatch):
    assert mixers.mixers(_small(kind))
    monkeypatch.setattr("training.node.model.keep_apart", lambda model: None)
    assert proof.packed(config_of(kind)) > 10 * LIMIT


@pytest.mark.parametrize("kind", sorted(HYBRIDS))
def test_what_a_mixer_hands_to_its_kernel_is_refused_by_name_in_plan_and_engine(kind, tmp_path):
    layers = text_layers(_small(kind))
    paths = [(layer, path) for layer in layers for path, m in layer.named_modules() if isinstance(m, torch.nn.Linear)]
    names = {path.rpartition(".")[2] for layer, path in paths if architecture._passed_by(layer, path)}
    assert names == set(types.PASSED_BY.get(kind, ()))
    config_of(kind).save_pretrained(tmp_path / "base")
    for name in names:
        recipe = load_recipe("tiny", {"lora.targets": f'["q_proj", "{name}"]'})
        said = cost_of(recipe).misfit(model_shape(config_of(kind)), recipe, 1)
        assert said.startswith(f"lora.targets: {name}: {kind} passes this weight directly to a kernel")
        with pytest.raises(RecipeError, match=f"lora.targets: {name}"):
            whole_model(recipe, tmp_path / "base")


def test_of_the_hybrids_those_with_experts_are_known():
    found = {kind for kind in HYBRIDS if any(expert_parameters(layer) for layer in text_layers(_small(kind)))}
    assert found == set(types.WITH_EXPERTS)


_one_segment = staticmethod(lambda positions, *_: attention.Segments((positions.shape[1],), None))


def test_each_proof_fails_where_there_is_something_to_find(monkeypatch):
    """A window that is not applied, a head's scale and cap that are not, samples that see each other, a router that is
    trained, an adapter that is passed by, a layer that is not there."""
    with monkeypatch.context() as patched:
        patched.setattr(attention, "_seen", lambda length, *_: torch.ones(length, length).bool().tril())
        assert proof.packed(config_of("gemma3_text")) > LIMIT
    with monkeypatch.context() as patched:
        patched.setattr(loss.Logits, "of", classmethod(lambda cls, config: cls()))
        assert proof.padded(config_of("cohere")) > LIMIT and proof.packed(config_of("gemma2")) > LIMIT
    with monkeypatch.context() as patched:
        patched.setattr(attention.Segments, "of", _one_segment)
        assert proof.apart(config_of("qwen3_moe")) > LIMIT
    with monkeypatch.context() as patched:
        patched.setattr(architecture, "ROUTERS", frozenset())
        assert proof.gradients(config_of("qwen2_moe")) > 0
    with monkeypatch.context() as patched:
        patched.setattr(architecture, "_passed_by", lambda layer, path: False)
        assert proof.gradients(config_of("jamba")) > 0 and proof.merged(config_of("jamba")) > LIMIT
    with monkeypatch.context() as patched:
        other = config_of("qwen3", num_hidden_layers=3)
        patched.setattr(proof, "model_shape", lambda config: model_shape(other))
        assert proof.counted(config_of("qwen3")) > LIMIT


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_what_32_bits_round_too_much_for_is_tried_in_64_and_what_is_wrong_stays_wrong(kind, monkeypatch):
    found = {dtype: proof.merged(config_of(kind), dtype) for dtype in (torch.float32, torch.float64)}
    assert found[torch.float64] < 1e-3 * found[torch.float32]
    monkeypatch.setattr(proof, "LIMIT", found[torch.float32] / 10)  # as if 32 bits were too few
    assert proof.proved(config_of(kind))["merged"] < proof.LIMIT
    monkeypatch.setattr(attention.Segments, "of", _one_segment)
    assert proof.proved(config_of(kind))["packed"] > proof.ROUNDED


def test_what_is_nothing_for_a_mixture_is_refused_before_anything_is_loaded(tmp_path):
    config_of("qwen3_moe").save_pretrained(tmp_path / "experts")
    recipe = load_recipe("tiny", {"tuning": "full"})
    with pytest.raises(RecipeError, match="routers of a qwen3_moe would drift") as refused:
        whole_model(recipe, tmp_path / "experts")
    shape = model_shape(config_of("qwen3_moe"))
    assert str(refused.value).endswith(cost_of(recipe).misfit(shape, recipe, 1))
    assert cost_of(recipe).misfit(model_shape(config_of("qwen3")), recipe, 1) == ""
