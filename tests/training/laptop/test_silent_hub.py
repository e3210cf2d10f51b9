"""A model hub that does not answer, and names that it does not know: said soon, in one sentence, with what to do."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from tests.support.checkout import Checkout
from tests.support.hub import Hub
from training.data.hub import HubDataSet, download
from training.data.sample import DataError
from training.laptop import base_model
from training.laptop.adapter.publish import HuggingFace
from training.laptop.derived import refuse_unknown, short_name_notes
from training.models import hub as hub_access
from training.models.hub import SilentHubError, hub_at
from training.recipe.recipe import RecipeError
from training.text.problems import AdapterError

CURE = '[mirrors] hub = "https://HOST" in cluster.toml names another'
REPO = "acme/Small"


@pytest.fixture
def nobody():
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    return address


@pytest.fixture
def silent():
    """Who accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []
        threading.Thread(target=lambda: [kept.append(server.accept()) for _ in range(9)], daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Writes a cluster.toml with these tables, for this test."""
    for name in ("HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))

    def write(text):
        (tmp_path / "cluster.toml").write_text(text, encoding="utf-8")

    write("")
    return write


def ended(done):
    """The sentence of a command that failed."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "httpx" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("words", [("models.add", REPO), ("plan", "--model", REPO), ("train", "--model", REPO)])
def test_commands_name_the_host_that_refuses_and_how_another_is_named(tmp_path, nobody, words):
    checkout = Checkout.at(tmp_path, f'[mirrors]\nhub = "{nobody}"\n')
    said = ended(checkout.fab(*words))
    assert said.startswith(f"{REPO} cannot be looked up: {nobody} does not answer ([Errno 111] Connection refused); ")
    assert said.endswith(CURE)


def test_a_hub_that_accepts_and_says_nothing_is_given_up(tmp_path, silent):
    said = ended(Checkout.at(tmp_path).fab("models.add", REPO, HF_ENDPOINT=silent))
    assert f"{silent} does not answer (no answer within 12 s); HF_ENDPOINT names it; without that {CURE}" in said


def test_the_address_is_the_environments_then_the_settings_then_the_hubs_own(settings, monkeypatch):
    assert base_model.hub_to_read().address == "https://huggingface.co"
    settings('[mirrors]\npreset = "china"')
    assert base_model.hub_to_read().address == "https://hf-mirror.com"
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.com")
    assert base_model.hub_to_read().address == "https://hub.example.com"


def test_a_mirror_of_the_settings_is_not_shown_the_token(settings, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert base_model.hub_to_read().token == "hf_x"
    settings('[mirrors]\npreset = "china"')
    assert base_model.hub_to_read().token is None and base_model.hub_to_read().withheld


def test_what_a_hub_says_is_waited_for_so_long_and_errors_are_its_own(silent, nobody, monkeypatch):
    monkeypatch.setattr(hub_access, "ANSWER_S", 0.2)
    for address, said in ((silent, "no answer within 0 s"), (nobody, "refused")):
        with pytest.raises(SilentHubError, match=rf"{address} does not answer \(.*{said}\)"):
            hub_at(address, None, "").told(_info(address))
    with Hub({}) as hub, pytest.raises(OSError, match="404"):
        hub_at(hub.url, None, "").told(_info(hub.url))


def _info(address):
    from huggingface_hub import HfApi

    return lambda token: HfApi(address, token).model_info(REPO)


def test_data_and_publishing_say_it_too(settings, silent, nobody, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_access, "ANSWER_S", 0.2)
    for address in (silent, nobody):
        with pytest.raises(DataError, match=rf"cannot be downloaded: {address} does not answer \(.*\); \[mirrors\]"):
            download(HubDataSet("acme/poems"), tmp_path, address)
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        monkeypatch.setenv("SPOTUNE_TOKEN_HOST", "127.0.0.1")
        with pytest.raises(AdapterError, match=rf"^{address} does not answer \(.*\)$"):
            HuggingFace().present("acme/mine")


def test_unknown_names_are_refused_before_machines_are_rented(tmp_path):
    with Hub({REPO: {"config.json": json.dumps({}).encode()}}) as hub:
        mirrors = f'name = "demo"\n[mirrors]\nhub = "{hub.url}"\n'
        checkout = Checkout.at(tmp_path, f'{mirrors}[models]\nnames = ["tiny", "qwen3-8bb"]\n')
        assert "[models] names in cluster.toml: unknown model 'qwen3-8bb'; did you mean qwen3-8b" in ended(
            checkout.fab("up", "--dry")
        )
        (tmp_path / "cluster.toml").write_text(f'{mirrors}[models]\nnames = ["{REPO}", "Qwen/Qwen3-8BB"]\n')
        said = ended(checkout.fab("up", "--dry"))
    assert "[models] names in cluster.toml: Qwen/Qwen3-8BB: did you mean qwen3-8b or " in said
    assert f"{hub.url} knows no such model" in said


def test_names_that_nobody_could_be_asked_about_are_noted_and_refuse_nothing(settings, nobody, monkeypatch):
    settings(f'[mirrors]\nhub = "{nobody}"')
    assert refuse_unknown(["tiny", "Qwen/Qwen3-8B"]) == []  # recipes: nobody is asked
    assert short_name_notes(["tiny", "qwen2.5-14", "./mine", REPO]) == [  # a rebuild has the models: it asks no hub
        "[models] names in cluster.toml: qwen2.5-14 is qwen2.5-14b (Qwen/Qwen2.5-14B-Instruct)"
    ]
    (note,) = refuse_unknown([REPO])
    assert note.startswith(f"[models] names in cluster.toml: {REPO} was not looked up: {nobody} does not answer")
    with Hub({REPO: {}}, gated={REPO}) as hub:
        settings(f'[mirrors]\nhub = "{hub.url}"')
        assert refuse_unknown([REPO]) == []
        with pytest.raises(RecipeError, match=r"acme/Other: .*knows no such model"):
            refuse_unknown(["acme/Other"])


def test_the_mirror_of_china_is_named_where_the_hub_itself_is_asked_and_not_where_a_mirror_is():
    assert 'preset = "china"' in hub_at("", None, "").another
    assert 'preset = "china"' not in hub_at("https://hf-mirror.com", None, "").another
