"""Whether our loss is the model's own, tried on tiny copies of real model types."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from transformers import AutoConfig  # noqa: E402

from training.model_names import load_recipe  # noqa: E402
from training.node import head_check  # noqa: E402
from training.node.attention import SEGMENTS  # noqa: E402
from training.node.head_check import LENGTHS, LIMIT, copies, difference, refuse_other_logits  # noqa: E402
from training.node.loss import Logits  # noqa: E402
from training.recipe import RecipeError  # noqa: E402

pytestmark = pytest.mark.torch


SMALL = {"intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 500, "pad_token_id": 0}


def _papers(folder, kind, **settings):
    """A model's folder as far as its configuration goes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoConfig.for_model(kind, **settings).save_pretrained(folder / kind)
    return folder / kind


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("recurrent_gemma", {"lru_width": 64, "hidden_size": 64, "num_attention_heads": 4} | SMALL)],
)
def test_logits_that_are_made_in_a_way_we_do_not_know_are_refused_by_what_they_are(tmp_path, kind, settings):
    folder = _papers(tmp_path, kind, **settings)
    with pytest.raises(
        RecipeError, match=rf"{kind}: our loss is not that of a '{kind}' \(its logits differ by .*docs/models.md"
    ):
        refuse_other_logits(load_recipe("tiny", {"batching": "padded"}), folder)


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize(
    ("kind", "settings", "made"),
    [
        ("granite", {"logits_scaling": 1.0}, Logits()),
        ("granite", {"logits_scaling": 8.0}, Logits(1 / 8)),
        ("minicpm3", {}, Logits(1 / 10)),
        ("cohere", {}, Logits(0.0625)),
        ("cohere2", {"logit_scale": 0.25}, Logits(0.25)),
        ("falcon_h1", {"lm_head_multiplier": 0.04}, Logits(0.04)),
        ("gemma2", {}, Logits(1.0, 30.0)),
        ("gemma3_text", {"final_logit_softcapping": 5.0}, Logits(1.0, 5.0)),
    ],
)
def test_logits_that_are_scaled_or_capped_are_made_as_the_model_makes_them(tmp_path, kind, settings, made, batching):
    folder = _papers(tmp_path, kind, **settings)
    assert Logits.of(AutoConfig.from_pretrained(folder)) == made
    assert difference(folder, batching).worst < LIMIT / 10


def test_the_copy_is_tried_with_our_attention_and_not_with_the_models_own(tmp_path, monkeypatch):
    """Two models of one configuration both have the attention that was asked for last."""
    seen = []
    monkeypatch.setattr(head_check, "_enlarge", lambda ours, theirs, ids: seen.extend((ours, theirs)))
    difference(_papers(tmp_path, "qwen2", hidden_size=32, **SMALL), "packed")
    assert [model.config._attn_implementation for model in seen] == [SEGMENTS, "eager"]


def test_a_copy_has_a_layer_of_each_kind_and_a_window_that_samples_exceed():
    config = AutoConfig.for_model("gemma3_text")
    assert config.layer_types[:5] == ["sliding_attention"] * 5
    small = next(copies(config))
    assert sorted(small.layer_types) == ["full_attention", *["sliding_attention"] * 3]
    assert small.sliding_window < max(LENGTHS)


def test_a_copy_has_samples_longer_than_its_chunks_and_than_what_an_indexer_picks(tmp_path):
    """Of models whose attention is not told of either, and whose own lengths no copy would reach."""
    small = {"intermediate_size_mlp": 64, "num_local_experts": 4, "hidden_size": 64, "head_dim": 16} | SMALL
    folder = _papers(tmp_path, "llama4_text", num_attention_heads=4, num_key_value_heads=2, **small)
    assert difference(folder, "padded").worst < LIMIT < difference(folder, "packed").worst
    indexed = next(copies(AutoConfig.for_model("deepseek_v32")))
    assert indexed.index_topk < min(LENGTHS)


def test_a_model_whose_packed_samples_see_each_other_is_caught_by_the_same_look(tmp_path, monkeypatch):
    """Were nothing done for it."""
    monkeypatch.setattr("training.node.model.keep_apart", lambda model: None)
    head_check.difference.cache_clear()
    folder = _papers(tmp_path, "lfm2", layer_types=["conv", "full_attention"] * 2, **SMALL | {"num_hidden_layers": 4})
    refuse_other_logits(load_recipe("tiny", {"batching": "padded"}), folder)
    with pytest.raises(RecipeError, match=r"lfm2.*batching=padded"):
        refuse_other_logits(load_recipe("tiny"), folder)


@pytest.mark.parametrize("kind", ["stablelm", "t5"])
def test_what_cannot_even_be_tried_is_said_in_one_sentence(tmp_path, kind):
    with pytest.raises(RecipeError) as refused:
        refuse_other_logits(load_recipe("tiny"), _papers(tmp_path, kind))
    assert "\n" not in str(refused.value) and f"'{kind}' cannot be trained" in str(refused.value)
    assert "docs/models.md" in str(refused.value)


def test_the_try_leaves_the_random_numbers_of_the_run_alone(tmp_path):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    difference(_papers(tmp_path, "llama"), "padded")
    assert torch.equal(before, torch.random.get_rng_state())
