"""Serving the local cloud's API as a process of its own."""

import pytest

from inventory.localcloud import served, tasks
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


@pytest.mark.parametrize("image", ["acs:ubuntu_22_04_x64", "acs:debian_12_x64"])
def test_that_it_has_debian_alone_is_said_where_another_system_is_asked_for(tmp_path, monkeypatch, capsys, image):
    (tmp_path / "cluster.toml").write_text(f'[aliyun]\nendpoint = "local"\nimage = "{image}"\n')
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.setattr(served, "serve", lambda *_: "127.0.0.1:8123")
    tasks.serve.body(None, wheels=False)
    said = capsys.readouterr().out
    assert ("Debian 12" in said) == ("ubuntu" in image) and "8123; next: fab up" in said
