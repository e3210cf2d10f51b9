"""fab models.add as a user types it, against a hub on loopback: the recipe that it writes is read, counted and
planned with."""

from __future__ import annotations

import json
import tomllib

import pytest

from tests.support.checkout import Checkout
from tests.support.hub import Hub
from tests.support.small_models import TYPES, WRAPPERS

pytestmark = pytest.mark.torch

WIDE = {"vocab_size": 2048}
MODELS = {
    "gemma3": WRAPPERS["gemma3"],
    "qwen3": TYPES["qwen3"] | WIDE,
    "qwen3_moe": TYPES["qwen3_moe"] | WIDE,
}
"""One that sees images too, a dense one and a mixture; others are read in training/node/test_wrappers.py."""


def repository(kind, **more):
    config = {"model_type": kind} | MODELS[kind] | more
    tokenizer = {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer_config.json": json.dumps(tokenizer).encode(),
        "model.safetensors": b"weights",
    }


@pytest.fixture
def checkout(tmp_path):
    return Checkout.at(tmp_path)


def sentence(done):
    """What a command ends with that cannot do it."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_model_is_added_and_planned_with(checkout, kind):
    repo = f"acme/Small-{kind.replace('_', '-')}"
    with Hub({repo: repository(kind)}) as hub:
        added = checkout.fab("models.add", repo, HF_ENDPOINT=hub.url)
        assert hub.downloads("model.safetensors") == [] and hub.authorised == []
    assert added.returncode == 0, added.stdout + added.stderr
    name = repo.partition("/")[2].lower()
    written = checkout.folder / "training" / "recipes" / f"{name}.toml"
    recipe = tomllib.loads(written.read_text("utf-8"))
    assert (recipe["base_model"], recipe["model_dir"], recipe["max_length"]) == (repo, name, 512)
    assert f"written to {written}" in added.stdout
    kept = json.loads((written.parent / "outlines-added.json").read_text("utf-8"))[repo]
    assert kept["config"]["model_type"] == kind

    for said in (name, repo):  # from now on without the hub
        planned = checkout.fab("plan", "--model", said, "--nodes", "2", "--card", "A10", "--json")
        assert planned.returncode == 0, planned.stdout + planned.stderr
    listed = checkout.fab("models", "--here", "--json")
    (row,) = (row for row in json.loads(listed.stdout) if row["name"] == name)
    assert row["kind"] == kind and 0 < row["active"] <= row["parameters"] < 1e7


def test_the_hub_is_the_one_that_the_nodes_fetch_from(checkout):
    with Hub({"acme/Small": repository("qwen3")}) as hub:
        (checkout.folder / "cluster.toml").write_text(f'[mirrors]\nhub = "{hub.url}"\n', encoding="utf-8")
        added = checkout.fab("models.add", "acme/Small")
    assert added.returncode == 0, added.stdout + added.stderr


@pytest.mark.parametrize("gate", ["gated", "gated_files"])
def test_a_gated_model_says_how_a_token_is_given_without_showing_it(checkout, gate):
    with Hub({"acme/Secret": repository("qwen3")}, **{gate: {"acme/Secret"}}) as hub:
        said = sentence(checkout.fab("models.add", "acme/Secret", HF_ENDPOINT=hub.url))
        assert "the hub asks for a token" in said
        assert "set HF_TOKEN in the environment, never in a command: read -rs HF_TOKEN && export HF_TOKEN" in said
        right = {"HF_TOKEN": hub.token, "SPOTUNE_TOKEN_HOST": "127.0.0.1"}
        wrong = sentence(checkout.fab("models.add", "acme/Secret", HF_ENDPOINT=hub.url, **right | {"HF_TOKEN": "hf_w"}))
        added = checkout.fab("models.add", "acme/Secret", HF_ENDPOINT=hub.url, **right)
        assert added.returncode == 0, added.stdout + added.stderr
        assert hub.leaked == [] and hub.token not in added.stdout + added.stderr
    assert "the hub refuses the token (40" in wrong and f"not accepted what {hub.url}/acme/Secret asks" in wrong


def test_what_cannot_be_added_is_said_before_anything_is_looked_up(checkout):
    (checkout.folder / "我的 模型").mkdir()
    for words, said in {
        ("Small",): "unknown model 'Small'; --model OWNER/NAME takes a model of the Hub",
        ("我的 模型",): "--model './我的 模型'",
        (str(checkout.folder),): f"needs no adding: fab train --model {checkout.folder} --data FILE",
        ("acme/Small", "--name", "茶"): "--name 茶: small letters",
        ("acme/tiny",): "there is a recipe tiny already",
    }.items():
        done = checkout.fab("models.add", *words)
        assert said in sentence(done) and "looking up" not in done.stdout, done.stdout + done.stderr
