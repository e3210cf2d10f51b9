"""ModelScope's SDK held at arm's length: what it raises is one sentence, and the token is in none. It is a stand-in
here, so this says nothing about the SDK itself."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from training.errors import AdapterError
from training.laptop.adapter.publish import Parcel

TOKEN = "ms-0123456789"


class HubApi:
    """Fails as a client does whose service is away, quoting what it was given."""

    def login(self, token):
        self.token = token

    def repo_exists(self, repo, token):
        raise ConnectionError(f"no route\nwith {token}")

    def create_repo(self, repo, **settings):
        raise KeyError("Visibility")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    for name in ("modelscope", "modelscope.hub", "modelscope.hub.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["modelscope.hub.api"].HubApi = HubApi  # type: ignore[attr-defined]
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    from training.laptop.adapter.modelscope import ModelScope

    return ModelScope()


def test_whatever_the_sdk_raises_is_one_sentence_without_the_token(hub):
    with pytest.raises(AdapterError, match=r"^ModelScope refused: ConnectionError: no route with \(token\)$"):
        hub.present("me/mine")
    with pytest.raises(AdapterError, match=r"^ModelScope refused: KeyError: 'Visibility'$"):
        hub.upload(Parcel("me/mine", {}), "words")


def test_a_token_that_is_refused_is_said_too(hub, monkeypatch: pytest.MonkeyPatch):
    def refuse(self, token):
        raise ValueError(f"{token} is invalid")

    monkeypatch.setattr(HubApi, "login", refuse)
    with pytest.raises(AdapterError, match=r"\(token\) is invalid"):
        type(hub)()
