"""What tests share. On CI a test that needs the local cloud or torch must run: a skip there is a failure."""

import importlib.util
import os
from pathlib import Path

import pytest

ACCEPTANCE = Path(__file__).with_name("acceptance")


def pytest_ignore_collect(collection_path, config):
    """tests/acceptance looks at the machines ./cluster.toml names: only where the command line asks for it."""
    if collection_path != ACCEPTANCE:
        return None
    asked = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return None if any(path.is_relative_to(ACCEPTANCE) for path in asked) else True


def pytest_runtest_setup(item):
    if item.get_closest_marker("torch") and importlib.util.find_spec("deepspeed") is None:
        absent("needs the [train] extra: pip install -e '.[train]'")
    if item.get_closest_marker("localcloud"):
        from inventory.localcloud.prerequisites import missing_prerequisites

        missing = missing_prerequisites()
        if missing:
            absent("the local cloud cannot run here: " + "; ".join(missing))
    if item.get_closest_marker("gpu") and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch and an NVIDIA GPU")


def absent(reason):
    if os.environ.get("CI"):
        pytest.fail(f"CI must run this: {reason}", pytrace=False)
    pytest.skip(reason)
