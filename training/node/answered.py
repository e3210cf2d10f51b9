"""Answers that `prepare` gave before, by all that they depend on: then neither tokenizer nor model is loaded.

Of a recipe that is what is said of data, model and adapter, so another learning rate asks the same question.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from training.data.source import Data, data_sha256
from training.recipe.recipe import Recipe
from training.run.folder import write_atomically
from training.text.files import drop_unused, mark_used, model_files, object_in, sha256_of

CODE = Path(__file__).parents[1]
PACKAGES = (
    *("torch", "transformers", "tokenizers", "jinja2", "peft", "numpy", "pyarrow"),
    *("deepspeed", "huggingface_hub", "sentencepiece", "tiktoken", "protobuf"),
)
OF_STEPS = {
    *("name", "licence", "global_batch", "micro_batch", "steps", "epochs", "save_every", "keep_checkpoints"),
    *("keep_best", "gradient_checkpointing", "loss_chunk", "auto", "gradient_sum", "sync_every", "optimizer"),
    "logging",
}
"""Keys of a recipe that say nothing of what is learned from, and by what."""
_ANSWER = "answer.json"


class Answered:
    """The answer to one question, in a folder of them."""

    def __init__(self, folder: Path, recipe: Recipe, model_dir: Path, data: Data, skip_bad: bool) -> None:
        asked = {
            "code": {str(path): sha256_of(CODE / path) for path in _code()},
            "packages": {"python": sys.version} | {name: _version(name) for name in PACKAGES},
            "recipe": recipe.model_dump(mode="json", exclude=OF_STEPS),
            "model": {name: _state(model_dir / name) for name in model_files(model_dir)},
            "data": [data_sha256(data.source), [file.name for file in data.files]],
            "skip_bad": skip_bad,
        }
        self._entry = folder / hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def read(self) -> dict[str, Any]:
        """It; empty where this was not asked before."""
        answer = object_in(self._entry / _ANSWER)
        if answer:
            mark_used(self._entry)
        return answer

    def keep(self, answer: dict[str, Any]) -> None:
        """For the next time; answers that nobody wants are dropped."""
        drop_unused(self._entry.parent.glob("*"))
        self._entry.mkdir(parents=True, exist_ok=True)
        write_atomically(self._entry / _ANSWER, json.dumps(answer))


def _code() -> list[Path]:
    """Without what Python keeps of it, which comes and goes while another process imports it."""
    paths = (path.relative_to(CODE) for path in CODE.rglob("*") if path.is_file())
    return sorted(path for path in paths if "__pycache__" not in path.parts)


def _state(file: Path) -> str:
    """Another one when a model's file was changed; of weights, whose headers alone are read, by size and time."""
    about = file.stat()
    return f"{about.st_size} {about.st_mtime_ns}" if file.suffix == ".safetensors" else sha256_of(file)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
