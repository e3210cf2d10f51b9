"""Answers that `prepare` gave before, by all that they depend on: then neither tokenizer nor model is loaded."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from training.data.source import Data, data_sha256
from training.recipe.recipe import Recipe
from training.text.files import drop_unused, half_made, mark_used, object_in, sha256_of

CODE = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "tokenizers", "jinja2", "peft", "numpy", "pyarrow")
_ANSWER = "answer.json"


class Answered:
    """The answer to one question, in a folder of them."""

    def __init__(self, folder: Path, recipe: Recipe, model_dir: Path, data: Data, skip_bad: bool) -> None:
        asked = {
            "code": _digests(CODE, "*.py"),
            "packages": {name: _version(name) for name in PACKAGES},
            "recipe": recipe.to_toml(),
            "model": _digests(model_dir, "*"),
            "data": [data_sha256(data.source), [file.name for file in data.files]],
            "skip_bad": skip_bad,
        }
        self._entry = folder / hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    def read(self) -> dict[str, Any]:
        """It; empty where this was not asked before."""
        answer = object_in(self._entry / _ANSWER)
        if answer:
            mark_used(self._entry)
        return answer

    def keep(self, answer: dict[str, Any]) -> None:
        """For the next time; answers that nobody wants are dropped."""
        drop_unused(self._entry.parent.glob("*"))
        fresh = half_made(self._entry)
        fresh.mkdir(parents=True)
        (fresh / _ANSWER).write_text(json.dumps(answer), encoding="utf-8")
        if not self._entry.exists():
            fresh.rename(self._entry)


def _digests(folder: Path, pattern: str) -> dict[str, str]:
    """Of the files below a folder; a model's weights are told by their sizes, as nothing here reads them."""
    return {
        str(path.relative_to(folder)): str(path.stat().st_size) if path.suffix == ".safetensors" else sha256_of(path)
        for path in sorted(folder.rglob(pattern))
        if path.is_file()
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
