"""A folder on this machine as the base model: its recipe derived, a real run from it, mistakes in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.paper_cluster import PaperCluster
from tests.support.paper_weights import shapes_of, write_shapes, write_weights
from tests.support.selection import selected
from tests.support.small_models import EXPERTS, LINEAR
from training.cost.shape import PlanError
from training.laptop import base_model, derived, start_run
from training.laptop.base_model import model_gone
from training.laptop.derived import counted, derived_text, folder_faults, missing_folder_notes
from training.laptop.start_run import resolve_recipe
from training.models import tiny
from training.models.folder import state_of
from training.models.names import resolve
from training.recipe.base import Base, BaseKind
from training.recipe.recipe import RecipeError
from training.text.files import INDEX, ORIGIN, SUMS, model_files

ROOT = Path(__file__).parents[3]
RUN = "tiny-20260131-154500"
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
    "max_position_embeddings": 512,
}


FILES = {"config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.json"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    mine = tmp_path / "My Model"
    mine.mkdir()
    (mine / "config.json").write_text(json.dumps(CONFIG))
    write_weights(mine)
    (mine / "tokenizer_config.json").write_text("{}")
    (mine / "tokenizer.json").write_text("{}")
    return mine


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        *((path, BaseKind.FOLDER) for path in ("./x", "/x", "~/x", "..", "a/b/c")),
        *((name, BaseKind.HUB) for name in ("Qwen/Qwen3-8B", "qwen3-8b", "acme/other")),
        ("tiny", BaseKind.BUILT_IN),
    ],
)
def test_what_kind_of_model_a_name_means(model, meant):
    assert resolve(model).base.kind is meant


def test_the_recipe_of_a_folder_is_derived_and_can_be_changed(folder: Path):
    recipe = resolve_recipe(str(folder), ["lora.rank=4"])
    assert (recipe.name, recipe.max_length, recipe.lora.rank) == ("my-model", 512, 4)
    assert recipe.base_model == Base(BaseKind.FOLDER, str(folder)) and recipe.model_dir.startswith("my-model-")
    assert counted(Base(BaseKind.FOLDER, str(folder))).layers == 2
    assert f"fab train --model '{folder}' --data FILE" in derived_text(resolve(str(folder)))
    other = folder.with_name("other") / "My Model"
    other.parent.mkdir()
    folder.rename(other)
    assert resolve_recipe(str(other), ()).model_dir != recipe.model_dir


def test_the_recipe_of_a_folder_is_shown_with_what_its_files_say(folder: Path, capsys):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"dtype": "float32"}))
    assert start_run.resolve_recipe(str(folder), ["lora.rank=4"], "5").lora.rank == 4
    shown = capsys.readouterr()
    comment = shown.err.replace("\n# ", " ")
    assert comment.count(f'base_model = "folder:{folder}"') == 1 and not shown.out
    assert "stored in float32" in comment and "no chat template" in comment and "ownload" not in comment
    (folder / "chat_template.jinja").write_text("{% if enable_thinking %}{% endif %}")
    start_run.resolve_recipe(str(folder), [])
    comment = capsys.readouterr().err.replace("\n# ", " ")
    assert "knows thoughts" in comment and "no chat template" not in comment


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = {"0": "<|endoftext|>", "1": "<|im_start|>", "2": "<|im_end|>"}
TOKENIZER = {
    "eos_token": {"content": "<|endoftext|>", "lstrip": False},
    "added_tokens_decoder": {number: {"content": token, "special": True} for number, token in MARKED.items()},
}


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ({"pad_token": "<|pad|>"}, "The padding token is <|pad|>."),
        (
            {"added_tokens_decoder": {str(n): {"content": f"<|reserved_{n}|>", "special": True} for n in (7, 8)}},
            "names no padding token: <|reserved_7|>, which nothing else uses, is taken (pad_token).",
        ),
        (
            {"pad_token": None},
            "names no padding token: <|endoftext|>, its end of text, is taken; pad_token sets another.",
        ),
    ],
    ids=["all said", "a token to spare", "no padding"],
)
def test_the_recipe_of_a_folder_says_what_fills_up(folder: Path, tokenizer, said):
    named = {"chat_template": CHATML} | TOKENIZER | tokenizer
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    comment = derived_text(resolve(str(folder))).replace("\n# ", " ")
    assert said in comment
    assert resolve_recipe(str(folder), ()).pad_token == ("<|reserved_7|>" if "reserved" in said else None)


def test_tokens_that_only_the_vocabulary_lists_are_read_there(folder: Path):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|endoftext|>"}))
    assert "is taken; pad_token" in derived_text(resolve(str(folder))).replace("\n# ", " ")
    added = [{"id": 9, "content": "<|unused_0|>", "special": True}, {"id": []}, 7]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert resolve_recipe(str(folder), ()).pad_token == "<|unused_0|>"


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"eos_token": 7, "pad_token": ["<pad>"], "added_tokens_decoder": [1], "additional_special_tokens": {"a": 1}},
        {"eos_token": "<e>\n[lora]", "pad_token": {"content": "\x1b[2J"}, "added_tokens_decoder": {"x": {}, "²": 1}},
        {"eos_token": "e" * 999, "pad_token": {"content": {}}, "added_tokens_decoder": {"1": {"content": 1}}},
        {"chat_template": [{"name": "default"}, 1], "extra_special_tokens": [[]]},
        {"chat_template": "{% for x in y %}", "added_tokens_decoder": {"9" * 5000: {"content": "e", "special": True}}},
    ],
)
@pytest.mark.parametrize("generation", ["[]", "{", "[" * 100_000, '{"eos_token_id": [[0], "1", true]}'])
def test_tokens_of_a_folder_that_are_none_are_not_shown(folder: Path, tokenizer, generation):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML} | tokenizer))
    (folder / "generation_config.json").write_text(generation)
    text = derived_text(resolve(str(folder)))
    assert "ends with" not in text and "padding token" not in text
    assert all(line.isprintable() for line in text.splitlines()) and resolve_recipe(str(folder), ()).lora.rank == 16


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"text_config": {}}, "a qwen3 knows more than text, and its text part was never shown to be trained alone"),
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are stored in awq"),
        ({"model_type": "laguna"}, "a laguna is not trained: PEFT 0.21.2 loses the adapter of its shared experts"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"in fp8; .* \(in 16 bits it takes [\d.]+ [kM]?B: look ",
        ),
        ({"hidden_size": "wide"}, "no model can be built from its config.json: .*hidden_size"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused_in_a_sentence(folder: Path, config, said):
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises((RecipeError, PlanError), match=said) as refused:
        resolve_recipe(str(folder), ())
    assert "\n" not in str(refused.value)


@pytest.mark.torch
def test_no_code_that_comes_with_a_model_is_run_whoever_answers(folder: Path, tmp_path):
    pytest.importorskip("transformers", reason="needs the [train] extra")
    ran = tmp_path / "ran"
    (folder / "conf.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import PretrainedConfig as Mine\n")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "conf.Mine"}}
    (folder / "config.json").write_text(json.dumps(CONFIG | own))
    code = "import sys; from training.laptop.start_run import resolve_recipe; resolve_recipe(sys.argv[1], ())"
    done = subprocess.run(
        [sys.executable, "-c", code, folder], cwd=ROOT, input="y\n" * 9, capture_output=True, text=True,
        env=os.environ | {"HOME": str(tmp_path)},
    )  # fmt: skip
    assert "type 'own' is code of its own, and no code that comes with a model is run" in done.stderr
    assert not ran.exists()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "its config.json cannot be read"),
        ("model.safetensors", "has no weights in safetensors"),
        ("tokenizer_config.json", "has no tokenizer"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_by_what(folder: Path, missing, said):
    (folder / missing).unlink()
    with pytest.raises(RecipeError, match=said):
        resolve_recipe(str(folder), ())
    with pytest.raises(RecipeError, match="there is no such folder"):
        resolve_recipe(str(folder / "nowhere"), ())
    with pytest.raises(RecipeError, match=r"~nobody-here/model: there is no such folder"):
        resolve_recipe("~nobody-here/model", ())


@pytest.mark.parametrize(
    ("made_here", "name", "way"),
    [
        (True, "merged", f"; fab merge --run {RUN} --here makes it"),
        (False, "merged", f"; fab merge --run {RUN} --fetch makes it"),
        (True, "model", f"; fab fetch --run {RUN} --here brings it, where that run trained the whole model"),
        (True, "other", ""),
    ],
)
def test_a_folder_of_a_run_that_is_not_made_yet_names_what_makes_it(tmp_path, monkeypatch, made_here, name, way):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / RUN
    with pytest.raises(RecipeError, match=r"there is no such folder$"):
        resolve_recipe(str(tmp_path / "runs" / RUN / name), ())
    run.mkdir(parents=True)
    (run / "launch.json").write_text(json.dumps({"run_dir": str(run) if made_here else f"/data/runs/{RUN}"}))
    with pytest.raises(RecipeError) as refused:
        resolve_recipe(str(tmp_path / "runs" / RUN / name), ())
    assert str(refused.value).endswith(f"there is no such folder{way}")


def test_a_merged_model_that_is_gone_is_merged_again_while_its_run_is_there(tmp_path):
    folder = tmp_path / "runs" / RUN / "merged"
    said = model_gone("mine", folder / "config.json")
    assert said.startswith(f"the base model of mine is gone: there is no {folder} any more: it was merged from {RUN}, ")
    assert f"Where nodes still have that run, fab merge --run {RUN} --fetch makes it again" in said
    assert "put it back" not in said
    folder.parent.mkdir(parents=True)
    (folder.parent / "launch.json").write_text(json.dumps({"run_dir": str(folder.parent)}))
    said = model_gone("mine", folder / "config.json")
    assert (
        said == f"the base model of mine is gone: there is no {folder} any more; fab merge --run {RUN} --here makes it"
    )
    mine = tmp_path / "mine"
    assert model_gone("mine", mine / "config.json").endswith(f"there is no {mine} any more; put it back there")


def test_a_folder_that_lacks_one_of_its_files_of_weights_is_refused_by_its_name(folder: Path):
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").rename(folder / files["a"])
    with pytest.raises(RecipeError, match=f"of its weights {files['b']} is missing, 1 of 2 files"):
        resolve_recipe(str(folder), ())


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def _only(folder: Path, name: str, content: str = "") -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_text(content)


def _beside_shards(folder: Path) -> None:
    for name in SHARDS:
        (folder / name).write_bytes((folder / "model.safetensors").read_bytes())
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}))


def _adapter(folder: Path, text: str) -> None:
    (folder / "adapter_config.json").write_text(text)


def _cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 2)


def _header(folder: Path, text: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


DAMAGED = {
    "stale beside shards": (_beside_shards, f"model.safetensors and {INDEX} are two sets of weights"),
    "no index": (lambda f: (f / "model.safetensors").rename(f / SHARDS[0]), f"{SHARDS[0]} is there, but neither"),
    "an index of nothing": (lambda f: _only(f, INDEX, "{}"), f"{INDEX} does not say which file holds which tensor"),
    "no index at all": (lambda f: _only(f, INDEX, "[" * 99_999), f"{INDEX} cannot be read"),
    "an index that leads out": (lambda f: _only(f, INDEX, '{"weight_map": {"a": "../x"}}'), "does not say which file"),
    "an LFS pointer": (lambda f: _only(f, "model.safetensors", "version https://git-lfs"), "is a Git LFS pointer"),
    "cut": (_cut, "not as long as its header says"),
    "no header": (lambda f: _header(f, b"[1]"), "is not a safetensors file"),
    "a deep header": (lambda f: _header(f, b"[" * 99_999), "is not a safetensors file"),
    "an odd header": (lambda f: _header(f, b'{"a": {"shape": 1}}'), "is not a safetensors file"),
    "pickles": (lambda f: _only(f, "pytorch_model.bin"), r"pytorch_model.bin is a pickle; .*save_pretrained"),
    "gguf": (lambda f: _only(f, "x.Q4_K.gguf"), "x.Q4_K.gguf is GGUF"),
    "an adapter": (lambda f: _adapter(f, '{"base_model_name_or_path": "a/b"}'), "it is an adapter of 'a/b'"),
    "no adapter either": (lambda f: _adapter(f, "{"), "adapter_config.json cannot be read"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer.json"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_folder_that_holds_no_whole_model_is_refused_by_its_name_before_anything_is_built(folder, case, monkeypatch):
    damage, said = DAMAGED[case]
    damage(folder)
    monkeypatch.setattr(derived, "counted", None)
    with pytest.raises(RecipeError, match=said) as refused:
        resolve_recipe(str(folder), ())
    assert str(refused.value).startswith(f"--model {folder}") and "\n" not in str(refused.value)


def test_copies_of_weights_are_not_the_models(folder: Path):
    _beside_shards(folder)
    (folder / "model.safetensors").unlink()
    model, state = model_files(folder), state_of(folder)
    assert {*SHARDS, INDEX, "tokenizer.json", "tokenizer_config.json"} <= {*model}
    for name in ("model copy", "model-00001-of-00002 copy", "model (1)", "consolidated"):
        (folder / f"{name}.safetensors").write_bytes(b"0")
    for name in ("tokenizer copy.json", "tokenizer_config (1).json", "tokenizer copy.model"):
        (folder / name).write_text("{}")
    assert (model_files(folder), state_of(folder)) == (model, state)
    assert resolve_recipe(str(folder), ()).max_length == 512


def test_an_index_that_names_the_single_file_is_no_second_set_of_weights(folder: Path):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    assert resolve_recipe(str(folder), ()).max_length == 512


def test_weights_that_the_config_does_not_want_are_refused_with_the_recipe(folder: Path, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_recipe(str(folder), ()).max_length == 512
    shapes = shapes_of(CONFIG)
    del shapes["model.layers.1.self_attn.v_proj.weight"]
    write_shapes(folder / "model.safetensors", shapes)
    with pytest.raises(PlanError, match=r"My Model: .* the files lack model.layers.1.self_attn.v_proj.weight"):
        resolve_recipe(str(folder), ())


def test_a_folder_among_the_names_is_looked_at_and_one_that_the_head_may_have_need_not_be_here(folder: Path):
    gone = folder.with_name("gone")
    names = ["tiny", "Qwen/Qwen3-8B", str(folder), str(gone)]
    (fault,) = folder_faults(names, sent_before=False)
    assert fault == f"[models] names in cluster.toml: {gone}: there is no such folder"
    assert folder_faults(names, sent_before=True) == []
    (note,) = missing_folder_notes(names)
    assert note.startswith(f"[models] names in cluster.toml: there is no folder {gone} on this machine; ")
    (folder / "tokenizer_config.json").unlink()
    (fault,) = folder_faults(names, sent_before=True)
    assert fault == f"[models] names in cluster.toml: {folder}: it has no tokenizer (tokenizer_config.json)"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def test_nothing_is_rented_for_a_folder_that_is_no_model_and_a_plan_notes_it(cluster, folder: Path, monkeypatch):
    (folder / "model.safetensors").unlink()
    monkeypatch.setenv("COLUMNS", "300")
    with cluster.toml.open("a") as toml:
        toml.write(f"[models]\nnames = [{json.dumps(str(folder))}]\n")
    said = f"[models] names in cluster.toml: {folder}: it has no weights in safetensors files"
    done = cluster.fab("up", "--yes")
    assert (done.returncode, done.stderr) == (2, f"{said}\n")
    assert cluster.calls("RunInstances") == []
    assert said in cluster.fab("plan", "--model", "tiny").stdout.replace("\n", " ")


def test_it_lies_among_models_as_links_and_is_hashed_anew_only_where_it_changed(folder: Path, tmp_path, monkeypatch):
    recipe, models = resolve_recipe(str(folder), ()), tmp_path / "models"
    before = base_model.link_model(recipe, models)
    placed = models / recipe.model_dir
    assert (placed / "model.safetensors").resolve() == folder / "model.safetensors"
    names = {path.name for path in folder.iterdir()}
    assert (placed / SUMS).is_file() and names == FILES
    with monkeypatch.context() as patched:
        patched.setattr(base_model, "seal_model", None)
        assert base_model.link_model(recipe, models) == before
    (placed / ORIGIN).write_text("{")
    assert base_model.link_model(recipe, models) == before, "a damaged record is made again"
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert base_model.link_model(recipe, models)["hash"] != before["hash"]


BESIDE = (".DS_Store", "desktop.ini", "._config.json", "._x.safetensors", "NOTES.txt", "README.md", "LICENSE")


def test_only_what_a_model_consists_of_is_hashed_and_its_templates_lie_below_it(folder: Path, tmp_path):
    recipe, models = resolve_recipe(str(folder), ()), tmp_path / "models"
    template = folder / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{tools}}")
    before = base_model.link_model(recipe, models)
    placed = models / recipe.model_dir
    assert (placed / template.relative_to(folder)).read_text() == "{{tools}}"
    for name in (*BESIDE, "config.json:Zone.Identifier", "checkpoint-5/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
        assert base_model.link_model(recipe, models) == before
    template.write_text("{{ other }}")
    after = base_model.link_model(recipe, models)
    assert after["hash"] != before["hash"] and (placed / "LICENSE").is_file()
    (folder / "LICENSE").write_text("another")
    os.utime(folder / "config.json", (1, 1))
    assert base_model.link_model(recipe, models)["hash"] == after["hash"]


KINDS = {
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {"sliding_window": 16, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": LINEAR,
}
OFTEN = ("qwen3", "gpt_oss", "gemma3")
SEEING = ("gemma3",)
"""Types that see images too: tests/training/node/test_wrappers.py has the others."""
CHANGES = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
ids, found = torch.arange(20, 90).unsqueeze(0), {}
for kind, (folder, adapter, sees) in json.load(sys.stdin).items():
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    base = auto.from_pretrained(folder, dtype=torch.float32).eval()
    before = base(ids).logits.detach().clone()
    tuned = PeftModel.from_pretrained(base, adapter).eval()
    found[kind] = float((tuned(ids).logits - before).abs().max())
print(json.dumps(found))
"""
"""By how much each adapter changes what its base says."""


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory):
    pytest.importorskip("torch", reason="needs the [train] extra")
    from tests.support.tiny_adapter import write_base

    return write_base(tmp_path_factory.mktemp("base") / "tiny")


def _trained(tiny_base: Path, home: Path, kind: str) -> tuple[Path, Path]:
    """A folder of that type, and the adapter that fab train made for it."""
    from tests.support.tiny_adapter import write_of_type, write_wrapper

    folder, data = home / f"tiny-{kind}", home / "data.jsonl"
    if kind in SEEING:
        write_wrapper(tiny_base, folder, kind)
    else:
        write_of_type(tiny_base, folder, kind, **KINDS[kind])
    tiny.write_data(data)
    env = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    env |= {"HOME": str(home), "COLUMNS": "160"}
    flags = ["--steps", "4", "--set", "max_length=128", "--set", "global_batch=4", "--set", "optimizer.warmup_steps=1"]
    fab = Path(sys.executable).with_name("fab")
    done = subprocess.run(
        [fab, "--search-root", str(ROOT), "train", "--model", str(folder), "--here", "--data", str(data), *flags],
        cwd=home, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "verified" in done.stdout
    (adapter,) = home.glob("runs/*/adapter")
    return folder, adapter


@pytest.fixture(scope="module")
def changes(request, tiny_base: Path, tmp_path_factory) -> dict[str, float]:
    """What CHANGES says of all of them, in a process without any code of ours."""
    asked = {
        kind: (*map(str, _trained(tiny_base, tmp_path_factory.mktemp("home"), kind)), kind in SEEING)
        for kind in selected(request, "kind")
    }
    argv = programs.forked(CHANGES, peft=True)
    told = subprocess.run(argv, input=json.dumps(asked), capture_output=True, text=True, check=True)
    assert "missing" not in told.stderr, "PEFT looks for tensors that the adapter has not"
    return json.loads(told.stdout.splitlines()[-1])


@pytest.mark.torch
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.proof) for kind in (*KINDS, *SEEING)]
)
def test_a_folder_becomes_an_adapter_that_plain_peft_loads(changes: dict[str, float], kind: str):
    assert changes[kind] > 0
    assert "folder:" not in (ROOT / "training" / "recipes" / "models.lock").read_text()
