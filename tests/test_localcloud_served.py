"""Serving the local cloud's API as a process of its own."""

import pytest

from inventory.localcloud import served
from inventory.localcloud.commands import LocalCloudError
from inventory.settings import Settings


def test_without_what_serves_it_is_one_sentence_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(served.prerequisites, "require", lambda: None)
    monkeypatch.setattr(served, "find_spec", lambda name: None)
    said = []
    with pytest.raises(LocalCloudError, match=r"pip install -e '\.\[local\]'"):
        served.serve(Settings.model_validate({"name": "bare"}), said.append)
    assert said == [] and not (tmp_path / "state").exists()
