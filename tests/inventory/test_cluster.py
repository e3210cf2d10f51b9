"""The cluster at hand."""

import os

import pytest

from inventory.cloud.errors import RentError
from inventory.settings import PATH_VARIABLE
from tests.support.local_cluster import LocalCluster


def test_a_cluster_of_the_tests_is_loaded_by_its_path_and_leaves_the_environment_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    with pytest.raises(RentError, match=r"fab local\.serve"):
        _ = LocalCluster(tmp_path, name="nobody").cluster
    assert PATH_VARIABLE not in os.environ
