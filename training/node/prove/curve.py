"""Five steps of a tiny model whose losses are known: every strategy must walk the same curve on every machine.

Weights and tokens come from arithmetic, so nothing is shipped and nothing depends on a random generator but the
adapter's first values. curve.json was computed by one process on a CPU in fp32; a test computes it again.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from training.data.collate import collate
from training.data.order import Order, micro_batches
from training.data.sample import IGNORED, Sample
from training.models.names import load_recipe
from training.node import rng
from training.node.strategies.registry import build_strategy
from training.recipe.recipe import Recipe

STORED = Path(__file__).with_name("curve.json")
STEPS, SAMPLES, VOCABULARY, WIDTH, LAYERS = 5, 12, 256, 64, 3
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-3}
"""Of a loss or a norm, relative. Sums in another order differ by some 1e-7, which Adam's first steps had made 1.4e-5 of
a norm on another kind of CPU; a card's fp32 products by 1e-4."""
SETTINGS = {
    "dtype": "float32",
    "lora.dropout": "0",
    "lora.rank": "4",
    "global_batch": "4",
    "micro_batch": "1",
    "batching": "padding-free",
    "optimizer.warmup_steps": "0",
}


@dataclass(frozen=True)
class Curve:
    """Losses and gradient norms, a step each."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]

    def apart(self, other: Curve) -> float:
        """The largest relative difference."""
        ours, theirs = (*self.losses, *self.norms), (*other.losses, *other.norms)
        return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def stored() -> Curve:
    """The curve that every strategy must walk."""
    known = json.loads(STORED.read_text(encoding="utf-8"))
    return Curve(tuple(known["losses"]), tuple(known["norms"]))


def recipe_of(strategy: str, checkpointing: bool, ranks: int) -> Recipe:
    """The tiny recipe for the walk; a pipeline has as many stages as three layers and the ranks allow."""
    stages = max(count for count in range(1, LAYERS + 1) if ranks % count == 0)
    chosen = {"strategy": strategy, "gradient_checkpointing": str(checkpointing).lower()}
    return load_recipe("tiny", {**SETTINGS, **chosen, "pipeline.stages": str(stages)})


def write_model(folder: Path) -> None:
    """A Qwen2 of three layers whose weights are sines."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            wave = torch.sin(torch.arange(weight.numel(), dtype=torch.float64) * (1.7 + 0.01 * number)).view_as(weight)
            weight.copy_(1 + 0.1 * wave if "norm" in name else wave / weight.shape[-1] ** 0.5)
    # not by save_pretrained, which writes on rank 0 alone once ranks have met
    weights = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(folder / "config.json", use_diff=False)


def samples() -> list[Sample]:
    """Tokens by arithmetic, of which two thirds are learned."""
    made = []
    for number in range(SAMPLES):
        ids = [(number * 131 + place * place * 7 + place * 17) % VOCABULARY for place in range(9 + 3 * number)]
        known = len(ids) // 3
        made.append(Sample(ids, [*[IGNORED] * known, *ids[known:]]))
    return made


def walk(recipe: Recipe, model_dir: Path) -> Curve:
    """Train five steps; all ranks together, the same on each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    strategy = build_strategy(recipe, model_dir, world)
    rng.seed_all(recipe.seed + 1 + rank)
    dataset, order = samples(), Order(SAMPLES, recipe.seed, recipe.global_batch)
    losses, norms = [], []
    for step in range(STEPS):
        numbers = order.step(step)
        learned = sum(dataset[number].learned for number in numbers)
        mine = micro_batches(numbers, strategy.replica, strategy.replicas, recipe.micro_batch)
        batches = [collate([[dataset[n]] for n in part], 0, recipe.batching) for part in mine]
        total = strategy.forward_backward(batches, 1 / learned).loss.double()
        dist.all_reduce(total)
        losses.append(total.item() / learned)
        norms.append(strategy.step(recipe.optimizer.lr).grad_norm)
    del strategy
    gc.collect()
    return Curve(tuple(losses), tuple(norms))
