"""Publishing with the real Hub client against a hub on loopback: private, verified, the token nowhere to be seen."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.hub import Hub
from training.laptop.adapter.publish import local_run, parcel
from training.models.card import CardFacts, card, losses, read_facts
from training.text.files import parse_sums, sums_of, sums_text
from training.text.problems import AdapterError

RUN = "qwen2.5-7b-20260131-154500"
TOKEN = "hf_neverShownAnywhere"
REPO = "acme/wenyan-adapter"
RECIPE = """\
name = "qwen2.5-7b"
base_model = "Qwen/Qwen2.5-7B-Instruct"
revision = "main"

[lora]
rank = 16
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A laptop's folder with a fetched run, its merged model too."""
    run = tmp_path / "runs" / RUN
    checkpoint = run / "checkpoints" / "step-40"
    (checkpoint / "adapter").mkdir(parents=True)
    (checkpoint / "adapter" / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 4096)
    config = {"base_model_name_or_path": "/data/models/Qwen2.5-7B-Instruct", "peft_type": "LORA", "r": 16}
    (checkpoint / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    state = {"step": 40, "base_model": "b" * 64, "data": "d" * 64}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    (checkpoint / "SHA256SUMS").write_text(sums_text(sums_of(checkpoint)))
    (run / "adapter").symlink_to("checkpoints/step-40/adapter")
    (run / "recipe.toml").write_text(RECIPE)
    rows = [{"step": 1, "loss": 2.5}, {"step": 20, "validation_loss": 1.75}, {"step": 40, "loss": 1.25}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "merged").mkdir()
    (run / "merged" / "model.safetensors").write_bytes(b"weights" * 1000)
    (run / "merged" / "config.json").write_text("{}")
    (run / "merged" / "SHA256SUMS").write_text(sums_text(sums_of(run / "merged")))
    (tmp_path / "fabfile.py").write_text("from training.laptop.adapter.tasks import namespace\n")
    return tmp_path


def fab(
    folder: Path, hub: Hub, *words: str, stdin: str = "", token: str = TOKEN, token_host: str = "127.0.0.1"
) -> subprocess.CompletedProcess[str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = {**keep, "PYTHONPATH": programs.PATH, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "COLUMNS": "200"}
    env |= {"HF_TOKEN": token} if token else {}
    env |= {"SPOTUNE_TOKEN_HOST": token_host}
    argv = [sys.executable, "-m", "fabric", "publish", *words]
    return subprocess.run(
        argv, cwd=folder, env=env, input=stdin, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("merged", [False, True])
def test_no_configuration_names_code_to_be_run(folder: Path, merged: bool):
    run = folder / "runs" / RUN
    place, sealed = (run / "merged",) * 2 if merged else (run / "adapter", run / "checkpoints" / "step-40")
    names = ("tokenizer_config.json", *(["config.json", "processor_config.json"] if merged else []))
    for name in names:
        (place / name).write_text('{"auto_map": {"AutoTokenizer": "evil/repo--x.Y"}, "model_max_length": 1e30}')
    for each in {sealed, run / "checkpoints" / "step-40"}:
        (each / "SHA256SUMS").write_text(sums_text({n: d for n, d in sums_of(each).items() if n != "SHA256SUMS"}))
    files = parcel(run, REPO, merged, private=True).files
    assert all(json.loads(files[name]) == {"model_max_length": 1e30} for name in names)
    if merged:
        sums = parse_sums(files["SHA256SUMS"].decode())
        assert {sums[name] for name in names} == {hashlib.sha256(files[name]).hexdigest() for name in names}


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr.strip()


def test_an_adapter_is_published_private_whole_and_verified_and_the_token_is_nowhere(folder: Path):
    with Hub({}, token=TOKEN) as hub:
        done = fab(folder, hub, "--repo", REPO, "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"published and verified: {hub.url}/{REPO}" in done.stdout
        there = hub.models[REPO]
    assert hub.private == {REPO}
    assert there["adapter_model.safetensors"] == (folder / f"runs/{RUN}/adapter/adapter_model.safetensors").read_bytes()
    assert json.loads(there["adapter_config.json"])["base_model_name_or_path"] == "Qwen/Qwen2.5-7B-Instruct"
    readme = there["README.md"].decode()
    assert all(word in readme for word in ("d" * 64, "1.2500", "1.7500", "rank = 16", "step 40"))
    assert hub.leaked == [] and any("/commit/main" in request for request in hub.authorised)
    assert TOKEN not in done.stdout + done.stderr
    written = [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert written == []
    listed = done.stdout.splitlines()[:3]
    assert [line.split()[-1] for line in listed] == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert "1.0 MiB" in listed[2] and "private" in done.stdout


def test_a_mirror_that_was_not_named_is_not_shown_the_token(folder: Path):
    with Hub({}, token=TOKEN) as hub:
        said = sentence(fab(folder, hub, "--repo", REPO, "--yes", token_host=""))
        assert "publishing to 127.0.0.1 shows it the token" in said and "SPOTUNE_TOKEN_HOST=127.0.0.1" in said
        assert (hub.requests, hub.authorised, hub.leaked) == ([], [], [])


def test_no_is_the_answer_unless_yes_is_said(folder: Path):
    with Hub({}, token=TOKEN) as hub:
        done = fab(folder, hub, "--repo", REPO, stdin="y\n")  # a pipe is no terminal
        assert done.returncode == 2 and "private" in done.stdout
        assert done.stderr.strip().endswith(f"to say yes: fab publish --repo {REPO} --yes")
        assert hub.models == {}


def test_a_merged_model_is_published_openly_where_that_is_said(folder: Path):
    with Hub({}, token=TOKEN) as hub:
        done = fab(folder, hub, "--repo", REPO, "--merged", "--public", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "PUBLIC: everyone can read it" in done.stdout
        sent = hashlib.sha256(hub.models[REPO]["model.safetensors"]).hexdigest()
        assert hub.private == set()
    assert sent == sums_of(folder / f"runs/{RUN}/merged")["model.safetensors"]


@pytest.mark.parametrize("merged", [False, True])
def test_the_path_of_a_base_model_that_was_a_folder_stays_at_home(folder: Path, merged: bool):
    run = folder / "runs" / RUN
    own = re.sub(r'base_model = "[^"]*"', 'base_model = "folder:/home/anna/secret plans/my-model"', RECIPE)
    (run / "recipe.toml").write_text(own)
    files = parcel(run, "anna/mine", merged, private=True).files
    sent = b"".join(file if isinstance(file, bytes) else Path(file).read_bytes() for file in files.values())
    assert b"fine-tuned from my-model" in sent
    assert b"anna/secret" not in sent and b"/home" not in sent


def test_what_the_hub_keeps_is_compared_with_what_was_sent(folder: Path):
    with Hub({}, token=TOKEN, stored_wrong={"adapter_model.safetensors"}) as hub:
        said = sentence(fab(folder, hub, "--repo", REPO, "--yes"))
    assert "does not hold what was sent: adapter_model.safetensors" in said


def test_a_repository_that_is_another_thing_is_left_alone(folder: Path):
    with Hub({REPO: {"thesis.pdf": b"x"}}, token=TOKEN) as hub:
        assert "exists and is public; say --public" in sentence(fab(folder, hub, "--repo", REPO, "--yes"))
        assert "other files (thesis.pdf)" in sentence(fab(folder, hub, "--repo", REPO, "--public"))
        assert hub.models[REPO] == {"thesis.pdf": b"x"}


def test_a_wrong_token_and_none_are_one_sentence_without_it(folder: Path):
    with Hub({}, token="hf_other") as hub:
        done = fab(folder, hub, "--repo", REPO, "--yes")
        assert "the Hub refused" in sentence(done) and TOKEN not in done.stdout + done.stderr
        assert "set HF_TOKEN" in sentence(fab(folder, hub, "--repo", REPO, "--yes", token=""))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--repo", "no-owner"], "OWNER/NAME is expected"),
        (["--repo", REPO, "--run", "tiny-20260101-000000"], "bring it home first"),
    ],
)
def test_what_cannot_be_published_is_one_sentence(folder: Path, words: list[str], said: str):
    with Hub({}, token=TOKEN) as hub:
        assert said in sentence(fab(folder, hub, *words, "--yes"))
        assert hub.models == {}


def test_a_damaged_adapter_is_not_published(folder: Path):
    path = folder / f"runs/{RUN}/checkpoints/step-40/adapter/adapter_model.safetensors"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is missing or damaged"):
        parcel(folder / "runs" / RUN, REPO, merged=False, private=True)


def test_the_newest_run_at_home_is_meant_without_an_id(folder: Path):
    for name in ("tiny-20260201-000000", "zeta-20250101-000000"):
        (folder / "runs" / name / "adapter").mkdir(parents=True)
    assert local_run(folder / "runs", "").name == "tiny-20260201-000000"
    assert local_run(folder / "runs", RUN).name == RUN


def test_a_run_that_trained_the_whole_model_is_told_what_puts_its_folder_on_the_hub(folder: Path):
    whole = "tiny-20260202-000000"
    (folder / "runs" / whole / "model").mkdir(parents=True)
    with pytest.raises(AdapterError, match=rf"{whole} trained the whole model.* hf upload OWNER/NAME .*{whole}/model"):
        local_run(folder / "runs", whole)


def test_the_card_names_what_the_hub_can_find_and_shows_both_models_numbers():
    numbers = {"samples": 9, "loss": 2.0, "perplexity": 7.389, "exact_match": None, "rouge_l": 0.5}
    evaluation = {"base": numbers, "tuned": {**numbers, "loss": 1.0}}
    text = card(REPO, CardFacts(RUN, 40, RECIPE, "b", "d", 1.25, None, [evaluation], merged=False))
    assert text.startswith("---\nbase_model: Qwen/Qwen2.5-7B-Instruct\nlibrary_name: peft\n")
    assert "| loss | 2.0000 | 1.0000 |" in text and "exact match" not in text and "validation" not in text
    assert "On 9 records held out, each" in text
    of_file = {**evaluation, "of": "eight.jsonl", "learned_before": 3}
    said = card(REPO, CardFacts(RUN, 40, RECIPE, "b", "d", 1.25, None, [evaluation, of_file], merged=False))
    assert "On 9 records held out" in said and "On 9 records of eight.jsonl, 3 of them trained on, each" in said
    tiny = RECIPE.replace("Qwen/Qwen2.5-7B-Instruct", "built-in:tiny")
    merged = card(REPO, CardFacts(RUN, 40, tiny, "b", "d", None, None, (), merged=True))
    assert "base_model:" not in merged.split("---")[1]
    seeing = card(REPO, CardFacts(RUN, 40, RECIPE, "b", "d", 1.25, None, (), merged=False, sees=True))
    assert 'AutoModelForImageTextToText.from_pretrained("Qwen/Qwen2.5-7B-Instruct")' in seeing
    assert "CausalLM" in text and "CausalLM" not in seeing
    assert losses(b"", 40) == (None, None)


@pytest.mark.parametrize(
    ("licence", "said"),
    [
        ("apache-2.0", "license: apache-2.0\n"),
        ("qwen-research", 'license: other\nlicense_name: "qwen-research"\n'),
        ("other", "license: other\n"),
        ("", ""),
    ],
)
def test_the_card_has_the_base_models_licence_as_the_hub_takes_it(licence, said):
    text = card(REPO, CardFacts(RUN, 40, f'licence = "{licence}"\n{RECIPE}', "b", "d", 1.25, None, (), merged=True))
    assert text.startswith(f"---\nbase_model: Qwen/Qwen2.5-7B-Instruct\n{said}library_name: transformers\n")


def test_the_card_says_what_ends_an_answer_where_that_was_taught(folder: Path):
    run = folder / "runs" / RUN
    assert "answer ends with" not in card(REPO, read_facts(run, (run / "adapter").resolve().parent, merged=False))
    (run / "data").mkdir()
    for learned in (True, False):
        report = {"end_of_turn": "<|im_end|>", "end_of_turn_learned": learned}
        (run / "data" / "report.json").write_text(json.dumps({"report": report}))
        said = "An answer ends with `<|im_end|>`; generate with that as `eos_token_id`." in (
            card(REPO, read_facts(run, (run / "adapter").resolve().parent, merged=False))
        )
        assert said == learned


@pytest.mark.parametrize("merged", [False, True])
def test_what_a_head_lays_beside_a_model_goes_to_no_hub(folder: Path, merged: bool):
    run = folder / "runs" / RUN
    place, sealed = (run / "merged",) * 2 if merged else (run / "adapter", run / "checkpoints" / "step-40")
    odd = ("adapter_model.bin", "training_args.bin", "modeling_x.py", "tokenizer_x.py", ".github/workflows/x.json")
    templates = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    for name in (*odd, "tokenizer.json", *templates):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("{}")
    (run / "checkpoints/step-40/adapter/adapter_config.json").write_text(
        '{"r": 16, "auto_mapping": {"parent_library": "x"}}'
    )
    for each in {sealed, run / "checkpoints" / "step-40"}:
        (each / "SHA256SUMS").write_text(sums_text({n: d for n, d in sums_of(each).items() if n != "SHA256SUMS"}))
    what = parcel(run, "anna/mine", merged, private=True)
    assert what.left_out == tuple(sorted(odd))
    ours = (
        {"model.safetensors", "config.json", "SHA256SUMS"}
        if merged
        else {"adapter_model.safetensors", "adapter_config.json"}
    )
    assert {*what.files} == {*ours, "README.md", "tokenizer.json", *templates}
    named = what.files["SHA256SUMS" if merged else "adapter_config.json"]
    assert isinstance(named, bytes) and not any(word.encode() in named for word in (*odd, "auto_mapping"))
