"""The Python environment that cluster.toml asks for, as values. Pure: the making is python_env.py's."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from deploy import conda, requirements_lock
from inventory.settings import Settings

LOCK = Path(__file__).with_name("requirements.lock")
BUILD_VERSION = 1
"""Raise it when the commands below build something else from the same lock."""


@dataclass(frozen=True)
class Environment:
    """What the settings ask for."""

    provider: str
    distribution: str
    flavour: str
    lock: str
    pypi: str
    conda: str
    miniforge: str
    wheelhouse: str

    @property
    def hash(self) -> str:
        """Changes when the environment has to be built again; mirrors do not count."""
        python = [self.distribution, conda.explicit_list("")] if self.provider == "conda" else ["system"]
        parts = [BUILD_VERSION, self.provider, *python, self.flavour, requirements_lock.lock_hash(self.lock)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def environment_from(settings: Settings, lock: str) -> Environment:
    """The environment cluster.toml asks for."""
    mirrors = settings.mirrors.resolved()
    return Environment(
        provider=settings.python_provider,
        distribution=settings.python.distribution,
        flavour=settings.torch_flavour,
        lock=lock,
        pypi=mirrors.pypi,
        conda=mirrors.conda,
        miniforge=mirrors.miniforge,
        wheelhouse=settings.python.wheelhouse,
    )
