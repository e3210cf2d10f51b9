"""fab models and fab models.add: the real Hub client against a hub on loopback, recipes written into a copy."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from invoke import Context

from deploy.models import base_models
from tests.support.hub import Hub
from training.cost import shape as shapes
from training.cost.cards import Rates
from training.cost.shape import PlanError, known_shape
from training.laptop import derived, models_on_nodes, plan_options, small_files, start_run
from training.laptop.list_tasks import add, list_models
from training.laptop.plan_options import PlanWish
from training.laptop.small_files import SmallFiles, notes
from training.models.folder import shape_of
from training.models.names import RECIPES, load_recipe, resolve
from training.plan.machines import PlannedMachines
from training.recipe.base import Base
from training.recipe.model_types import ADMITTED, PADDED_ALONE, UNTRAINABLE, mixing, untrainable
from training.recipe.reading import with_changes
from training.recipe.recipe import RecipeError

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
TEMPLATE = "{% if enable_thinking %}{% endif %}"
REPO = "acme/My-Qwen3"


def _files(config: dict[str, object], template: str = TEMPLATE) -> dict[str, bytes]:
    tokenizer = json.dumps({"chat_template": template} if template else {}).encode()
    return {"config.json": json.dumps(config).encode(), "tokenizer_config.json": tokenizer, "model.safetensors": b"w"}


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of training/recipes, which the commands write into; an empty home."""
    copy = tmp_path / "recipes"
    shutil.copytree(RECIPES, copy)
    monkeypatch.setattr("training.models.names.RECIPES", copy)
    for module in ("training.cost.shape", "training.laptop.derived"):
        monkeypatch.setattr(f"{module}.ADDED", copy / "outlines-added.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    shapes.outlines.cache_clear()
    small_files.looked_up.cache_clear()
    yield copy
    shapes.outlines.cache_clear()
    small_files.looked_up.cache_clear()


def _look(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repo: str = REPO) -> SmallFiles:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "looked-up").mkdir(parents=True)
    return small_files.look_up(Base.parse(repo), tmp_path / "looked-up")


def test_the_small_files_alone_are_fetched_and_say_what_the_recipe_says(tmp_path: Path, monkeypatch):
    with Hub({REPO: _files(CONFIG)}) as hub:
        model = _look(hub, monkeypatch, tmp_path)
        assert hub.downloads("model.safetensors") == [] != hub.downloads("config.json")
    assert model.config == CONFIG and small_files.GATED not in model.source.note
    assert "enable_thinking" in model.source.note and model.source.positions == 1024
    with Hub({REPO: _files(CONFIG, "")}) as hub:
        assert "no chat template" in _look(hub, monkeypatch, tmp_path / "other").source.note


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ({"license": "apache-2.0"}, "apache-2.0"),
        ({"license": "other", "license_name": "qwen-research"}, "qwen-research"),
        ({"license": "other"}, "other"),
        ({"license": "mit", "license_name": "mine"}, "mit"),
        ({"license": "other", "license_name": "two\nlines"}, "other"),
        ({}, ""),
    ],
)
def test_a_licence_is_called_by_its_own_name_where_the_hub_has_none_for_it(tmp_path, monkeypatch, card, licence):
    with Hub({REPO: _files(CONFIG)}, cards={REPO: card}) as hub:
        assert _look(hub, monkeypatch, tmp_path).source.licence == licence


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"dtype": "float16"}, "stored in float16; they are read as bfloat16"),
        ({"torch_dtype": "float32"}, "stored in float32, twice as large; they are read as bfloat16"),
        ({"text_config": {"dtype": "float32"}}, "stored in float32"),
        ({"dtype": "bfloat16"}, ""),
        ({}, ""),
    ],
)
def test_a_recipe_says_what_the_files_are_stored_in_where_it_reads_them_as_something_else(config, said):
    note = " ".join(notes(config, TEMPLATE))
    assert said in note and ("stored" in note) is bool(said)


@pytest.mark.parametrize(
    ("repo", "said"),
    [
        ("acme/nothing", "acme/nothing cannot be looked up at http://127"),
        ("acme/gated", r"asks for a token \(40[13]\); set HF_TOKEN"),
    ],
)
def test_a_model_that_cannot_be_looked_up_is_said_in_a_sentence(tmp_path: Path, monkeypatch, repo, said):
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with Hub({"acme/gated": _files(CONFIG)}, gated={"acme/gated"}) as hub, pytest.raises(RecipeError, match=said) as no:
        _look(hub, monkeypatch, tmp_path, repo)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_config": {}}, "knows more than text"),
        (
            {"quantization_config": {"quant_method": "awq"}, "model_type": "rwkv"},
            "its weights are stored in awq.*needed$",
        ),
        ({"model_type": "laguna"}, "a laguna is not trained: PEFT 0.21.2 loses the adapter"),
        ({"model_type": "rwkv"}, "models of type 'rwkv' are not admitted; docs/models.md"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_counted(changes, said):
    with pytest.raises(RecipeError, match=said):
        small_files.refuse_untrainable(Base.parse(REPO), CONFIG | changes)


@pytest.mark.parametrize(("kind", "reason"), sorted((UNTRAINABLE | PADDED_ALONE).items()))
def test_a_type_that_is_known_not_to_be_exact_is_refused_by_why(kind, reason):
    with pytest.raises(RecipeError, match=rf"{kind}.*{reason}\W+docs/models.md"):
        small_files.refuse_untrainable(Base.parse(REPO), CONFIG | {"model_type": kind})
    assert kind not in ADMITTED and bool(untrainable({"model_type": kind})) is (kind in UNTRAINABLE)
    if kind in PADDED_ALONE:
        assert reason in mixing(kind, load_recipe("tiny"))


@pytest.mark.torch
def test_a_model_gets_a_recipe_that_everything_finds_by_name_and_by_id(recipes, tmp_path, monkeypatch):
    from training.models.names import recipe_name

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with Hub({REPO: _files(CONFIG)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        text = derived.new_text(resolve(REPO), derived.new_name(resolve(REPO)))
    (recipes / "my-qwen3.toml").write_text(text)
    assert "#   fab train --model my-qwen3 --data FILE\n" in text
    recipe = load_recipe(REPO)
    assert recipe_name(REPO) == "my-qwen3" and recipe.base_model.name == REPO and recipe.max_length == 1024
    assert known_shape(Base.parse(REPO)).layers == 2 and known_shape(Base.parse("Qwen/Qwen3-8B")).layers == 36
    with pytest.raises(RecipeError, match="there is a recipe my-qwen3 already"):
        derived.new_name(resolve(REPO))
    with pytest.raises(RecipeError, match="--name My: small letters"):
        derived.new_name(resolve(REPO), "My")


@pytest.mark.parametrize("model", ["qwen3-8b", "Qwen/Qwen3-8B"])
def test_the_recipe_of_a_shipped_model_is_written_to_be_edited_without_asking_a_hub(recipes, capsys, model):
    add.body(Context(), model)
    path = recipes / "qwen3-8b.toml"
    assert path.read_text().rstrip() in capsys.readouterr().out
    before = load_recipe("qwen3-8b")
    path.write_text(path.read_text().replace("rank = 16", "rank = 8"))
    assert load_recipe(model) == with_changes(before, **{"lora.rank": 8})
    with pytest.raises(RecipeError, match=r"there is a recipe qwen3-8b already; .* or edit it"):
        derived.new_name(resolve(model))
    with pytest.raises(RecipeError, match="there is a recipe qwen3-4b already"):
        derived.new_name(resolve(model), "qwen3-4b")
    assert derived.new_name(resolve(model), "mine") == "mine"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("repo", "stored", "said"),
    [
        ("Qwen/Qwen3-8B", "fp8", r"stored in fp8; a model in 16 .* \(in 16 bits it takes 16\.4 GB: look .* in BF16\)$"),
        ("unsloth/gpt-oss-20b-BF16", "mxfp4", r"stored in mxfp4; a model in 16 .* \(in 16 bits it takes 41\.8 GB: "),
    ],
)
def test_a_model_in_fewer_bits_is_refused_with_what_it_takes_in_16(recipes, repo, stored, said):
    config = shapes.outlines()[repo]["config"] | {"quantization_config": {"quant_method": stored}}
    with pytest.raises(RecipeError, match=said):
        small_files.refuse_untrainable(Base.parse(repo), config)


@pytest.mark.parametrize(
    ("repo", "meant"),
    [
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("mistralai/Ministral-3-8B-Instruct-2512", "ministral3-8b"),
        ("acme/nothing-like-it", ""),
    ],
)
def test_the_makers_own_files_in_fewer_bits_lead_to_the_recipe_of_their_copy_in_16(repo, meant):
    config = {"model_type": "none that is counted", "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(RecipeError) as refused:
        small_files.refuse_untrainable(Base.parse(repo), config)
    question = f"did you mean {meant}? " if meant else ""
    assert str(refused.value).startswith(f"{repo}: {question}its weights are stored in mxfp4")


@pytest.mark.torch
def test_a_model_is_trained_and_planned_by_its_id_and_nothing_is_written(recipes, tmp_path, monkeypatch, capsys):
    before = sorted(path.name for path in recipes.iterdir())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with Hub({REPO: _files(CONFIG)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        recipe = start_run.resolve_recipe(REPO, ["lora.rank=4"], "5")
        assert len(hub.downloads("config.json")) == 1, "fewer steps shorten the warm-up, which asks for it again"
    assert (recipe.name, str(recipe.base_model), recipe.model_dir) == ("my-qwen3", REPO, "my-qwen3")
    assert (recipe.lora.rank, recipe.steps, recipe.max_length) == (4, 5, 1024)
    assert plan_options.subject(recipe, PlanWish())[0].layers == 2
    shown = capsys.readouterr()
    assert f'base_model = "{REPO}"' in shown.err and f"fab models.add {REPO} writes it" in shown.err and not shown.out
    assert f"#   fab train --model {REPO} --data FILE\n" in shown.err and "--model my-qwen3" not in shown.err
    assert before == sorted(path.name for path in recipes.iterdir())


def test_what_is_missing_to_count_a_model_is_said_by_its_id(recipes, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else importlib)
    with Hub({REPO: _files(CONFIG)}) as hub, pytest.raises(PlanError) as refused:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
        (tmp_path / "cluster.toml").write_text('name = "mine"\nprovider = "static"\n')
        start_run.resolve_recipe(REPO, [])
    said = str(refused.value)
    assert said.startswith(f"{REPO}: its layers are counted with torch and transformers, and this Python lacks torch: ")
    assert "pip install -e '.[train]' (" in said and "fab up and the base deploy first, so that the head counts" in said
    assert "\n" not in said


def test_a_model_without_a_recipe_is_fetched_by_its_id(recipes):
    (folder,) = base_models([REPO])
    assert (str(folder.base), folder.revision, folder.path) == (REPO, "main", "/data/models/my-qwen3")
    assert [each.folder for each in base_models(["Qwen/Qwen3-8B", "qwen3:8b"])] == ["qwen3-8b"]
    with pytest.raises(RecipeError, match="wanted for acme/My-Qwen3 at main and for other/My-Qwen3"):
        base_models([REPO, "other/My-Qwen3"])


def _machines(card_bytes: float, ranks: int = 4) -> PlannedMachines:
    return PlannedMachines(
        ranks=ranks,
        ranks_per_node=1,
        card="NVIDIA A10",
        card_bytes=card_bytes,
        usable_bytes=card_bytes - 2.6e9,
        spare_bytes=0.0,
        ram_bytes=64e9,
        rates=Rates(40e12, 1.7e9, 600e9),
    )


def test_the_table_says_what_lies_there_and_how_it_fits():
    there = {"te1": {"qwen3-8b", "qwen3-4b"}, "te2": {"qwen3-8b"}, "te3": {"qwen3-8b", "qwen3-4b"}}
    found = {row.name: row for row in models_on_nodes.rows(_machines(23028 * 2**20), there)}
    assert found["qwen3-4b"].on == ("te1", "te3")
    assert [models_on_nodes.where(found[name]) for name in ("qwen3-8b", "qwen3-4b", "qwen3-14b")] == [
        "yes",
        "2 of 3",
        "-",
    ]
    assert (found["qwen3-1.7b"].fits, found["qwen2.5-14b"].fits) == ("yes", "divided among them")
    assert (found["qwen3-30b-a3b"].fits, found["qwen2.5-72b"].fits) == ("in stages", "no")
    alone = {row.name: row.fits for row in models_on_nodes.rows(_machines(24e9, ranks=1), None)}
    assert (alone["qwen2.5-14b"], alone["gemma3-12b"], alone["qwen3-32b"]) == ("in four bits", "in four bits", "no")
    assert models_on_nodes.without_recipe({"te1": {"qwen3-8b", "tiny"}, "te2": {"my-qwen3"}}) == ["my-qwen3"]
    unknown = next(models_on_nodes.rows(None, None))
    assert (unknown.on, models_on_nodes.where(unknown), unknown.fits) == (None, "?", "")
    assert next(models_on_nodes.rows(None, None)).name == unknown.name


def test_of_a_mixture_the_table_says_what_a_token_meets():
    found = {row.name: row for row in models_on_nodes.rows(None, None)}
    assert models_on_nodes.billions(found["qwen3-30b-a3b"]) == "30.5 (3)"
    assert models_on_nodes.billions(found["qwen3-8b"]) == "8.19"


def test_the_models_of_this_machine_are_not_said_to_lie_on_a_head(monkeypatch, capsys):
    monkeypatch.setattr("training.laptop.models_on_nodes.asked", lambda here: (None, {"te1": {"merged-0c11cb5c"}}, []))
    for here, column, place in ((True, "here", "this machine"), (False, "nodes", "the nodes")):
        list_models.body(Context(), here=here)
        shown = capsys.readouterr().out
        assert column in models_on_nodes.header(here) and f"on {place} without a recipe: merged-0c11cb5c" in shown


def test_settings_that_cannot_be_read_are_said_once_below_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    (tmp_path / "cluster.toml").write_text('name = "demo\n')
    at, there, notes = models_on_nodes.asked(here=False)
    assert at is None and there is None
    assert len(notes) == 1 and "cluster.toml" in notes[0] and "a quote is opened and not closed" in notes[0]


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layers", "vocab_size", "num_local_experts", "depth"])
@pytest.mark.parametrize("inside", ["", "text_config", "vision_config"])
def test_counts_that_no_model_has_are_refused_before_anything_is_built(key, inside, tmp_path):
    config = {"model_type": "qwen2", "num_hidden_layers": 28, "vocab_size": 151_936, "num_attention_heads": 16}
    assert untrainable(config) == ""
    part = {**config, key: 10**9}
    config = {"model_type": "gemma3", inside: part} if inside else part
    assert f"its {key} is 1000000000" in untrainable(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=rf"its {key} is 1000000000"):  # nor where no laptop has seen it
        shape_of(tmp_path, tmp_path / "cache", ask=dict)
