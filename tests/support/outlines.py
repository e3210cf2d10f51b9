"""The outlines of the shipped recipes' base models (training/recipes/outlines.json), counted on what their config.json
says (configs.toml). `python -m tests.support.outlines` writes them; tests/training/node/test_outline.py counts them
again.
"""

from __future__ import annotations

import json
import tomllib
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

from training.cost.shape import SHIPPED, ModelShape

CONFIGS = Path(__file__).with_name("configs.toml")


def configs() -> dict[str, dict[str, Any]]:
    """By base model; what a config leaves out is its class's own, and "null" stands for what TOML lacks."""
    read = tomllib.loads(CONFIGS.read_text(encoding="utf-8"))
    return {name: {key: None if value == "null" else value for key, value in one.items()} for name, one in read.items()}


def counted(config: dict[str, Any]) -> ModelShape:
    """The shape of the model of a configuration."""
    from transformers import AutoConfig

    from training.node.outline import model_shape

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_shape(AutoConfig.for_model(**deepcopy(config)))


def text() -> str:
    """A line a model."""
    each = {name: {"config": config, "outline": counted(config).to_outline()} for name, config in configs().items()}
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(each.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    SHIPPED.write_text(text(), "utf-8")
