"""Whether our loss is the model's own, tried on tiny copies of real model types."""

from __future__ import annotations

import json
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from transformers import AutoConfig  # noqa: E402

from training.data.collate import collate  # noqa: E402
from training.data.sample import Sample  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import architecture, head_check  # noqa: E402
from training.node.adapter.generate import load_base  # noqa: E402
from training.node.architecture import build, config_of  # noqa: E402
from training.node.attention import SEGMENTS  # noqa: E402
from training.node.cross_entropy import Logits  # noqa: E402
from training.node.head_check import LENGTHS, LIMIT, check_loss_matches_model, copies, difference  # noqa: E402
from training.node.model import LossModel, inputs  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402
from training.text.files import STATE  # noqa: E402

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
        check_loss_matches_model(load_recipe("tiny", {"batching": "padded"}), folder)


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


FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 8.0, 16.0, 32.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096} | FACTORS
STRETCHING = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 4096},
    "phimoe": {"rope_parameters": LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.5}},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 64.0, "rope_theta": 1e4}},
}
EIGHT_WIDE = SMALL | {"initializer_range": 0.5, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("kind", STRETCHING)
def test_a_rotary_embedding_that_stretches_itself_does_so_by_max_length_alone(tmp_path, monkeypatch, kind, batching):
    folder = _papers(tmp_path, kind, **EIGHT_WIDE | STRETCHING[kind])
    assert difference(folder, batching).worst < LIMIT
    difference.cache_clear()
    monkeypatch.setattr(architecture, "stretch_for", lambda *_: None)
    assert difference(folder, batching).worst > LIMIT
    difference.cache_clear()


@pytest.mark.parametrize("kind", STRETCHING)
def test_a_long_sample_changes_nothing_of_a_short_one_beside_or_behind_it(tmp_path, kind):
    short = {"max_position_embeddings": 16} if kind == "llama" else {"original_max_position_embeddings": 16}
    own = STRETCHING[kind]["rope_parameters"] | ({} if kind == "llama" else short)
    config = config_of(_papers(tmp_path, kind, **EIGHT_WIDE | short | {"rope_parameters": own}))
    torch.manual_seed(0)
    fused = LossModel(build(config, attn_implementation=SEGMENTS), head_check.RECIPE).eval()
    few, many = (Sample(one, one) for one in ([5, 6, 7, 8, 9, 10], list(range(5, 35))))

    def loss_of(*samples):
        with torch.no_grad():
            return fused(**inputs(collate([samples], 0, "packed"), "cpu"))[0].item()

    alone = loss_of(few)
    assert loss_of(few, many) == pytest.approx(alone + loss_of(many), rel=1e-6)
    assert loss_of(few) == alone


def test_a_model_is_asked_and_measured_with_the_range_that_its_run_was_trained_with(tmp_path):
    own = {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 16}}
    folder = _papers(tmp_path, "phi3", **EIGHT_WIDE | own | {"original_max_position_embeddings": 16})
    torch.manual_seed(0)
    build(config_of(folder)).save_pretrained(folder)
    (tmp_path / "step-1" / "adapter").mkdir(parents=True)
    (tmp_path / "step-1" / STATE).write_text(json.dumps({"recipe": {"max_length": 32}}))
    ids = torch.arange(5, 37)[None]
    with torch.no_grad():
        base, beside = load_base(folder), load_base(folder, tmp_path / "step-1" / "adapter")
        as_long, short = base(ids).logits[:, :6], base(ids[:, :6]).logits
        assert torch.allclose(beside(ids[:, :6]).logits, as_long, atol=1e-4)
    assert not torch.allclose(short, as_long, atol=1e-2)


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
    check_loss_matches_model(load_recipe("tiny", {"batching": "padded"}), folder)
    with pytest.raises(RecipeError, match=r"lfm2.*batching=padded"):
        check_loss_matches_model(load_recipe("tiny"), folder)


@pytest.mark.parametrize("kind", ["stablelm", "t5"])
def test_what_cannot_even_be_tried_is_said_in_one_sentence(tmp_path, kind):
    with pytest.raises(RecipeError) as refused:
        check_loss_matches_model(load_recipe("tiny"), _papers(tmp_path, kind))
    assert "\n" not in str(refused.value) and f"'{kind}' cannot be trained" in str(refused.value)
    assert "docs/models.md" in str(refused.value)


def test_the_try_leaves_the_random_numbers_of_the_run_alone(tmp_path):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    difference(_papers(tmp_path, "llama"), "padded")
    assert torch.equal(before, torch.random.get_rng_state())
