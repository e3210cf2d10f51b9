"""Recorded answers of the real API: other people's material, read where it lies and never kept here."""

import json
import os
from pathlib import Path

import pytest

from tests.support.skips import RECORDINGS

FOLDER = Path(os.environ.get("SPOTUNE_ECS_SAMPLES") or Path(__file__).parents[3] / "shared/samples/aliyun")
needs_samples = pytest.mark.skipif(not FOLDER.is_dir(), reason=RECORDINGS)


def sample(name):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def names(pattern="*.json"):
    return sorted(path.name for path in FOLDER.glob(pattern)) if FOLDER.is_dir() else []
