"""The cluster at hand."""

import os

import pytest

from inventory.settings import PATH_VARIABLE, SettingsError
from tests.local_cluster import LocalCluster


def test_a_cluster_of_the_tests_is_loaded_by_its_path_and_leaves_the_environment_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=r"fab local\.up"):
        _ = LocalCluster(tmp_path, name="nobody").cluster
    assert PATH_VARIABLE not in os.environ
