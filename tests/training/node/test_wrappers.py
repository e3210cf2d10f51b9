"""Models that see images too: their text part is trained by the names of the repository's own files, and an adapter or
a merge is what transformers and PEFT by themselves load for them."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402

from tests.support.small_models import ALONE, WRAPPERS  # noqa: E402
from tests.support.type_proof import LIMIT, Adapted, packed  # noqa: E402
from tests.training.node.test_types import config_of  # noqa: E402
from training.cost.shape import known_shape  # noqa: E402
from training.cost.strategies import STRATEGIES  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import architecture  # noqa: E402
from training.node.adapter import generate, merge  # noqa: E402
from training.node.cross_entropy import Logits  # noqa: E402
from training.node.head_check import VOCABULARY, copies, difference  # noqa: E402
from training.node.known_outline import known_outline  # noqa: E402
from training.node.model import causal_model, lora_config, whole_model  # noqa: E402
from training.node.outline import model_shape, shape_of_folder  # noqa: E402
from training.node.strategies.stage import refuse_misfit  # noqa: E402
from training.recipe.base import Base  # noqa: E402
from training.recipe.model_types import mixing, types_of, untrainable  # noqa: E402
from training.recipe.recipe import Recipe, RecipeError  # noqa: E402

pytestmark = pytest.mark.torch

KINDS = sorted({*WRAPPERS, "gemma4-experts"})
NESTED = {"gemma3", "mistral3"}
"""Whose files have the text part as a model of its own within the other."""
LAYER = "base_model.model.model.language_model.layers."
IDS = torch.arange(3, 33).unsqueeze(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each kind's folder as transformers writes it."""
    made = {}
    for kind in KINDS:
        torch.manual_seed(0)
        made[kind] = tmp_path_factory.mktemp("wrappers") / kind
        architecture.build(config_of(kind)).float().save_pretrained(made[kind])
    return made


def _logits(folder, adapter=None):
    """By no code of ours."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        return model.eval()(IDS).logits[0]


def _adapter(folder, to, **settings):
    """Written by PEFT as a recipe asks for it, every tensor random."""
    torch.manual_seed(1)
    base = architecture.load(architecture.config_of(folder), folder, dtype=torch.float32)
    recipe = load_recipe("tiny", {f"lora.{key}": value for key, value in settings.items()})
    model = get_peft_model(base, lora_config(recipe, base, folder))
    for p in (p for p in model.parameters() if p.requires_grad):
        p.data += 0.1 * torch.randn_like(p)
    model.save_pretrained(to)
    return to


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_loaded_whole_from_the_repositorys_own_files(folders, kind):
    saved = load_file(folders[kind] / "model.safetensors")
    begins = "language_model.model.layers." if kind in NESTED else "model.language_model.layers."
    assert any(name.startswith(begins) for name in saved)
    assert any(not name.startswith((begins.removesuffix("layers."), "lm_head")) for name in saved)
    config = architecture.config_of(folders[kind])
    model, told = architecture.load(config, folders[kind], dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    assert type(model) is type(AutoModelForImageTextToText.from_pretrained(folders[kind]))
    torch.testing.assert_close(model(IDS).logits[0], _logits(folders[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_part_alone_is_adapted_even_where_the_other_has_modules_of_the_same_names(folders, tmp_path, kind):
    for number, settings in enumerate(({}, {"targets": '["q_proj", "o_proj"]'})):
        model, to = architecture.build(config_of(kind)), tmp_path / str(number)
        _adapter(folders[kind], to, **settings)
        names = load_file(to / "adapter_model.safetensors").keys()
        assert names and all(name.startswith(LAYER) for name in names)
        get_peft_model(model, LoraConfig.from_pretrained(to))
        lora = {name for name, _ in model.named_modules() if name.endswith("lora_A.default")}
        assert len(lora) == len(names) / 2 and all("language_model.layers" in name for name in lora)


@pytest.mark.parametrize("kind", KINDS)
def test_what_plain_peft_loads_says_what_was_trained(folders, tmp_path, kind):
    torch.manual_seed(0)
    small = Adapted.of(config_of(kind))
    base = causal_model(small.model)
    small.model.save_pretrained(tmp_path / "adapter")
    hidden = small.hidden([small.samples[0]])
    ours = Logits.of(base.config)((hidden @ base.get_output_embeddings().weight.T).detach())
    ids = torch.tensor([small.samples[0].ids])
    own = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if "lora_" not in name}
    plain = AutoModelForImageTextToText.from_config(config_of(kind)).float()
    plain.load_state_dict(own)
    with torch.no_grad():
        before = plain(ids).logits[0].clone()
        theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(ids).logits[0]
    assert (ours - theirs).norm() < 1e-5 * theirs.norm() < 1e-1 * (before - theirs).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_writes_the_bases_own_names_and_leaves_the_rest_as_it_is(folders, tmp_path, kind):
    adapter = _adapter(folders[kind], tmp_path / "adapter")
    merge.merge(folders[kind], adapter, tmp_path / "merged")
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[kind], tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == len(load_file(adapter / "adapter_model.safetensors")) / 2
    assert all("language_model" in name and ".layers." in name for name in changed)
    merged, beside, base = _logits(tmp_path / "merged"), _logits(folders[kind], adapter), _logits(folders[kind])
    assert (merged - beside).norm() < 1e-5 * beside.norm() < 1e-1 * (base - beside).norm()


@pytest.mark.parametrize("kind", ["gemma4-experts", "qwen3_5_moe"])
def test_a_merge_of_experts_too_writes_the_bases_own_names_and_says_what_the_adapter_does(folders, tmp_path, kind):
    plain = _adapter(folders[kind], tmp_path / "plain")
    adapter = _adapter(folders[kind], tmp_path / "adapter", experts="true", dropout="0")
    merge.merge(folders[kind], adapter, tmp_path / "merged")
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[kind], tmp_path / "merged"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and any(".experts." in name for name in changed)
    merged, beside, without = (
        _logits(tmp_path / "merged"),
        _logits(folders[kind], adapter),
        _logits(folders[kind], plain),
    )
    assert (merged - beside).norm() < 1e-5 * beside.norm() < 1e-1 * (without - beside).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_read_token_by_token_as_the_whole_is_read_at_once(folders, kind):
    forward = generate.reader(generate.load_base(folders[kind]))
    forward(IDS[0, :20].tolist())
    last = [forward([token]) for token in IDS[0, 20:].tolist()][-1]
    right = _logits(folders[kind])[-1]
    assert (last - right).norm() < 1e-4 * right.norm()


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3_5"])
def test_a_head_of_its_own_is_merged_where_transformers_looks_for_it(folders, tmp_path, kind):
    adapter = _adapter(folders[kind], tmp_path / "adapter", modules_to_save='["lm_head"]')
    merge.merge(folders[kind], adapter, tmp_path / "merged")
    head = "language_model.lm_head.weight" if kind in NESTED else "lm_head.weight"
    assert head in load_file(tmp_path / "merged" / "model.safetensors")
    merged, beside = _logits(tmp_path / "merged"), _logits(folders[kind], adapter)
    assert (merged - beside).norm() < 1e-5 * beside.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_what_the_text_part_does_and_memory_holds_the_rest_too(kind):
    whole, text = model_shape(config_of(kind)), model_shape(config_of(kind).get_text_config())
    assert (whole.kinds, whole.order, whole.hidden, whole.vocab) == (text.kinds, text.order, text.hidden, text.vocab)
    assert whole.matmul_parameters == text.matmul_parameters
    model = architecture.build(config_of(kind))
    inside = {id(module) for module in architecture.text_modules(model).values()}
    beside = (p.numel() for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False))
    assert whole.rest - text.rest == sum(beside) > 0


@pytest.mark.parametrize(("size", "billions"), [("4b", 4.30), ("12b", 12.19), ("27b", 27.43)])
def test_the_shipped_recipes_have_as_many_parameters_as_their_makers_say(size, billions):
    shape = known_shape(Base.parse(f"google/gemma-3-{size}-it"))
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.001)
    assert (shape.kind, dict(shape.attends)[1024] > 4 * dict(shape.attends)[0]) == ("gemma3", True)


def test_a_repository_is_known_by_its_settings_whatever_it_says_of_what_no_matrix_depends_on():
    eye = {"num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 4304}
    eye |= {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14, "vision_use_head": False}
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": eye, "eos_token_id": [1, 106]}
    assert known_outline(config) == known_shape(Base.parse("google/gemma-3-4b-it"))
    assert known_outline(config | {"text_config": text | {"intermediate_size": 10241}}) is None


def test_files_with_a_head_whose_settings_say_nothing_are_not_taken_for_tied(tmp_path):
    """Mistral Small 3.x, of whose class transformers 5 ties head and embedding unless it is told."""
    config = config_of("mistral3", tie_word_embeddings=False)
    model = architecture.build(config).float()
    model.save_pretrained(tmp_path)
    assert "language_model.lm_head.weight" in load_file(tmp_path / "model.safetensors")
    said = json.loads((tmp_path / "config.json").read_text())
    assert said.pop("tie_word_embeddings") is said["text_config"].pop("tie_word_embeddings") is False
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert not shape_of_folder(tmp_path).tied
    loaded = architecture.load(architecture.config_of(tmp_path), tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.get_input_embeddings().weight)


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_before_a_run_has_the_models_own_logits(folders, kind, batching):
    assert difference(folders[kind], batching).worst < 1e-5


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_the_copy_before_a_run_is_thin_in_every_part(kind):
    config = config_of(kind)
    config.vision_config.num_hidden_layers, config.get_text_config().vocab_size = 3, 2 * VOCABULARY
    copy = next(copies(config))
    assert copy.vision_config.num_hidden_layers == 1 and copy.get_text_config().vocab_size == VOCABULARY


def test_the_copy_of_a_deep_model_has_a_layer_of_each_kind_with_what_it_has_of_its_own():
    deep = {"num_hidden_layers": 12, "layer_types": None, "global_head_dim": 32}
    text = {key: value for key, value in (WRAPPERS["gemma4"]["text_config"] | deep).items() if value is not None}
    config = config_of("gemma4", text_config=text)
    copy = next(copies(config)).get_text_config()
    assert copy.layer_types == 3 * ["sliding_attention"] + ["full_attention"]
    assert [layer.head_dim for layer in copy.per_layer_config] == [16, 16, 16, 32]
    torch.manual_seed(0)
    assert packed(next(copies(config))) < 10 * LIMIT


def test_the_copy_of_a_model_whose_last_layers_take_anothers_keys_has_such_layers_of_each_kind():
    deep = {"num_hidden_layers": 18, "layer_types": 3 * (5 * ["sliding_attention"] + ["full_attention"])}
    text = WRAPPERS["gemma4"]["text_config"] | deep | {"num_kv_shared_layers": 8}
    config = config_of("gemma4", text_config=text)
    copy = next(copies(config)).get_text_config()
    assert copy.layer_types == 2 * ["sliding_attention", "full_attention"]
    assert copy.kv_sharing_modes == 2 * ["store"] + 2 * ["reuse"]
    assert packed(config) < 1e-4


def test_full_tuning_of_a_text_part_is_refused_before_anything_is_loaded(folders):
    recipe = load_recipe("tiny", {"tuning": "full"})
    said = "tuning = full: of a gemma3, which knows more than text, an adapter alone is trained"
    with pytest.raises(RecipeError, match=said) as refused:
        whole_model(recipe, folders["gemma3"])
    shape = model_shape(config_of("gemma3"))
    assert str(refused.value).endswith(STRATEGIES["zero0"].misfit(shape, recipe, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_part_lies_in_stages(folders, kind):
    recipe: Recipe = load_recipe("tiny", {"strategy": "pipeline"})
    said = f"a {config_of(kind).model_type} model cannot lie in stages; possible: llama, mistral,"
    assert STRATEGIES["pipeline"].misfit(model_shape(config_of(kind)), recipe, 2).startswith(said)
    with pytest.raises(RecipeError, match=said):
        refuse_misfit(recipe, folders[kind], architecture.config_of(folders[kind]), 2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, ""),
        ({"model_type": "qwen3_5", "text_config": {}}, ""),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, "a mistral3 with mistral4 knows more"),
        ({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}}, "a qwen3_vl with qwen3_vl_text"),
        ({"model_type": "mistral3", "text_config": {}, "quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"model_type": "mistral3", "text_config": {"quantization_config": {"quant_method": "awq"}}}, "stored in awq;"),
        (
            {"model_type": "qwen3", "compression_config": {"quant_method": "compressed-tensors"}},
            "in compressed-tensors;",
        ),
        ({"model_type": "qwen3", "compression_config": {"bits": 4}}, "stored in an unknown way;"),
    ],
)
def test_what_knows_more_than_text_is_trained_where_that_was_shown(config, said):
    assert said in untrainable(config) and bool(said) == bool(untrainable(config))


def test_a_text_part_that_was_never_proved_shares_no_rows():
    packed = load_recipe("tiny", {"batching": "packed"})
    kinds = types_of({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}})
    assert [bool(mixing(kind, packed)) for kind in kinds] == [False, True]
    assert {kind for config in WRAPPERS.values() for kind in types_of(config)} <= ALONE.keys()
