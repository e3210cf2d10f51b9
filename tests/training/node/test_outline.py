"""Outlines: what is counted on models without weights, held against formulas, against loaded models, and kept."""

from __future__ import annotations

import importlib.util
import json

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from transformers import AutoConfig  # noqa: E402

from tests.support.llama_shape import model_shape as by_formula  # noqa: E402
from tests.support.outlines import configs, text  # noqa: E402
from training.cost.shape import SHIPPED, PlanError, added_outlines, known_shape, read_outline  # noqa: E402
from training.models import folder as outline  # noqa: E402
from training.models.names import load_recipe, recipe_names  # noqa: E402
from training.node.known_outline import known_outline  # noqa: E402
from training.node.outline import model_shape  # noqa: E402
from training.recipe.base import Base  # noqa: E402
from training.recipe.tables import Lora  # noqa: E402

pytestmark = pytest.mark.torch
FORMULA = {"llama", "mistral", "qwen2", "qwen3"}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
ALIKE = sorted(name for name, config in configs().items() if config["model_type"] in FORMULA)


def test_the_outlines_of_all_recipes_are_those_counted_on_what_their_config_json_says():
    named = {str(load_recipe(name).base_model) for name in recipe_names()}
    assert named - added_outlines().keys() == configs().keys(), "but for those that fab models.add wrote"
    assert SHIPPED.read_text() == text()


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_counted_of_llamas_and_qwens_is_what_the_formulas_say(name):
    found, right = known_shape(Base.parse(name)), by_formula(configs()[name])
    assert found == right
    for lora in (Lora(), Lora(targets=("q_proj", "down_proj"), rank=4), Lora(dora=True, modules_to_save=("lm_head",))):
        assert found.trainable_parameters(lora) == right.trainable_parameters(lora)


@pytest.mark.parametrize(
    ("kind", "total", "active"),
    [
        ("gpt_oss", 116.829, 5.171),
        ("qwen3_next", 79.674, 3.562),
        ("qwen3_5_text", 8.954, 7.936),
        ("qwen3_5_moe_text", 34.661, 2.945),
        ("deepseek_v3", 671.026, 36.6),
    ],
)
def test_of_a_mixture_all_parameters_and_those_that_a_token_is_multiplied_with(kind, total, active):
    """Billions, of the classes' own settings, which are those of models that were released."""
    shape = model_shape(AutoConfig.for_model(kind))
    assert shape.parameters / 1e9 == pytest.approx(total, abs=0.001)
    assert shape.matmul_parameters / 1e9 == pytest.approx(active, rel=0.001)
    assert shape.mixture == (kind != "qwen3_5_text")


def test_lora_adapts_no_experts_and_no_router_unless_it_is_asked_to():
    """Of Qwen3-30B-A3B 13 million parameters; all linear modules, as PEFT 0.21.2 takes the words, have 996 million."""
    more = {"num_hidden_layers": 48, "hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128}
    shape = model_shape(AutoConfig.for_model("qwen3_moe", moe_intermediate_size=768, **more))
    assert shape.parameters / 1e9 == pytest.approx(30.532, abs=0.001)
    assert shape.trainable_parameters(Lora(rank=16)) == 13_369_344
    assert set(shape.largest.linears) == {f"self_attn.{part}_proj" for part in "qkvo"}


def test_a_config_of_a_known_shape_is_not_counted_again_and_one_that_differs_in_anything_that_counts_is():
    config = configs()["Qwen/Qwen3-8B"]
    around = {"rope_theta": 1e7, "max_position_embeddings": 131072, "dtype": "float16", "eos_token_id": 5}
    assert known_outline(config | around) == known_shape(Base.parse("Qwen/Qwen3-8B"))
    for other in ({"num_hidden_layers": 37}, {"attention_bias": True}, {"tie_word_embeddings": True}):
        assert known_outline(config | other) is None
    assert known_outline({"model_type": "nobody_knows"}) is None
    assert known_outline({}) is None


def test_windows_bound_what_attention_costs():
    shape = model_shape(AutoConfig.for_model("gemma3_text"))
    windows = dict(shape.attends)
    assert windows == {0: 4 * 8 * 256, 4096: 22 * 8 * 256}
    assert [shape.kinds[kind].window for kind in shape.order[:6]] == [4096] * 5 + [0]


def test_a_folder_is_counted_once_and_again_where_its_config_changed(tmp_path, monkeypatch):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    AutoConfig.for_model("qwen3", **SMALL).save_pretrained(folder)
    first = outline.shape_of(folder, cache)
    assert first.kind == "qwen3" and first.layers == 2
    with monkeypatch.context() as patched:
        patched.setattr(outline.subprocess, "run", None)
        assert outline.shape_of(folder, cache) == first
    (kept,) = cache.iterdir()
    kept.write_text("{")
    assert outline.shape_of(folder, cache) == first, "a damaged one is counted again"
    AutoConfig.for_model("qwen3", **SMALL | {"num_hidden_layers": 3}).save_pretrained(folder)
    assert outline.shape_of(folder, cache).layers == 3


def test_what_cannot_be_built_is_said_in_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody_knows"}))
    with pytest.raises(PlanError, match="no model can be built from its config") as refused:
        outline.shape_of(tmp_path, tmp_path / "cache")
    assert "\n" not in str(refused.value)
    with pytest.raises(PlanError, match=r"config.json cannot be read: No such file"):
        outline.shape_of(tmp_path / "nowhere", tmp_path / "cache")
    with pytest.raises(PlanError, match="outline of a model cannot be read"):
        read_outline({"kind": "qwen2"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden": "64"},
        {"rest": -1},
        {"order": [7]},
        {"order": []},
        {"tied": "no"},
        {"kind": "\x1b[2J"},
        {"vocab": 1e9},
    ],
    ids=str,
)
def test_an_outline_that_can_be_of_no_model_is_refused(wrong):
    right = known_shape(Base.parse("Qwen/Qwen3-8B")).to_outline()
    assert read_outline(json.loads(json.dumps(right))) == known_shape(Base.parse("Qwen/Qwen3-8B"))
    with pytest.raises(PlanError, match="outline of a model cannot be read"):
        read_outline(right | wrong)
    with pytest.raises(PlanError, match="outline of a model cannot be read"):
        read_outline(right | {"kinds": [right["kinds"][0] | {"packed": None}]})


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_a_python_that_lacks_a_library_is_told_which_and_how_it_is_had(tmp_path, monkeypatch, name):
    folder = tmp_path / "model"
    folder.mkdir()
    AutoConfig.for_model("qwen3", **SMALL).save_pretrained(folder)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each: None if each == name else find(each))
    with pytest.raises(PlanError, match=rf"this Python lacks {name}: pip install -e .*README.md") as refused:
        outline.shape_of(folder, tmp_path / "cache")
    assert "\n" not in str(refused.value)
