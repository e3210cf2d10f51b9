"""The row of the outline: the largest model that one tries to plan for, counted layer by layer on the meta device.

Whole processes, imports included, as a preparation starts one. The peer is what `accelerate estimate-memory` does for a
model of the Hub, of the same config.json: build it without weights, and give its size and its largest layer's, but no
layer's parameters, FLOPs or LoRA. The count itself is checked in every run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.bench.rows import CommandFailed, Group, Measure, checked, paired
from tests.support.local_cluster import ROOT
from training.cost.shape import read_outline

LARGEST = {  # Qwen/Qwen3-235B-A22B, by its page
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
PARAMETERS = 235_093_634_560
BUFFERS = 128
"""Numbers that are no parameters: the frequencies of the positions, twice."""
RUNS = 5
PEER = """
import sys
from accelerate import init_empty_weights
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoConfig, AutoModelForCausalLM
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
total, (largest, _) = calculate_maximum_sizes(model)
print(total, largest)
"""


def run(*argv: str) -> tuple[str, float]:
    """What a program of this Python says, and the seconds it takes. Raises CommandFailed."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    return checked(done), time.monotonic() - began


def ours(folder: Path) -> float:
    """Seconds of counting. Raises CommandFailed where the count is another."""
    said, took = run("-m", "training.node.outline", "--config", str(folder))
    (outline,) = json.loads(said.splitlines()[-1]).values()
    return _same(read_outline(outline).parameters, took)


def peer(folder: Path) -> float:
    """Seconds of accelerate's estimate. Raises CommandFailed where it is of another model."""
    said, took = run("-c", PEER, str(folder))
    return _same(int(said.split()[0]) // 4 - BUFFERS, took)  # bytes of float32


def _same(parameters: int, took: float) -> float:
    if parameters != PARAMETERS:
        raise CommandFailed(f"{parameters} parameters were counted, of {PARAMETERS}")
    return took


@contextmanager
def ready(folder: Path) -> Iterator[Mapping[str, Measure]]:
    """A folder with nothing but the config.json."""
    (folder / "config.json").write_text(json.dumps(LARGEST), encoding="utf-8")
    yield {"plan_outline_s": lambda: paired(lambda: ours(folder), lambda: peer(folder), RUNS)}


GROUP = Group(("plan_outline_s",), ready)
