"""Acceptance of a real cluster, by other means than the deploy used: `pytest tests/acceptance`.

Reads cluster.toml (or $SPOTUNE_CLUSTER) and checks every node over ssh; changes nothing.
"""

import tempfile
from pathlib import Path

import pytest
import testinfra

from inventory.cloud.errors import RentError
from inventory.cluster import load_cluster
from inventory.settings import SettingsError
from tests.support.ssh_program import ssh_config

try:
    CLUSTER, REASON = load_cluster(), ""
except (SettingsError, RentError) as error:
    CLUSTER, REASON = None, str(error)


@pytest.fixture(scope="session")
def cluster():
    if CLUSTER is None:
        pytest.skip(f"no cluster to accept: {REASON}")
    return CLUSTER


@pytest.fixture(scope="session")
def open_host(cluster):
    """name -> testinfra host; connections are shared, so that hundreds of checks take seconds."""
    with tempfile.TemporaryDirectory(prefix="spt", dir="/tmp") as folder:
        config = Path(folder) / "config"
        config.write_text(ssh_config(cluster.nodes, folder))
        yield lambda name: testinfra.get_host(f"ssh://{name}", ssh_config=str(config), sudo=_needs_sudo(cluster, name))


def _needs_sudo(cluster, name):
    return next(node.user for node in cluster.nodes if node.name == name) != "root"


def pytest_generate_tests(metafunc):
    if "node" in metafunc.fixturenames:
        nodes = CLUSTER.nodes if CLUSTER else []
        metafunc.parametrize("node", nodes or [None], ids=[n.name for n in nodes] or ["none"])


@pytest.fixture
def host(open_host, node):
    return open_host(node.name)


@pytest.fixture(scope="session")
def head(open_host, cluster):
    return open_host(cluster.head.name)
