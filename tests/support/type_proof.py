"""Whether a type of model can be trained exactly, tried on a small one with random weights: each proof is a number that
must be small, by name.

`packed`, `padded`   the loss and logits of samples in one row, or in rows of their own, are those of each alone
`apart`              another first sample changes nothing of the others
`gradients`          every trained parameter gets a gradient; no router is trained, nothing outside the text's layers
`merged`             with the adapter merged into its weights the model says the same
`counted`            parameters, and trained ones, are as many as the outline says
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PretrainedConfig

from training.data.collate import collate
from training.data.sample import Sample
from training.node.architecture import ROUTERS, text_layers
from training.node.attention import SEGMENTS
from training.node.head_check import LENGTHS, RECIPE, VOCABULARY, compared, precise
from training.node.model import LossModel, causal_model, inputs, trainable
from training.node.outline import BROKEN, model_shape
from training.recipe.recipe import Recipe

LIMIT = 1e-5
"""Largest relative difference that floating point may make."""
ROUNDED = 1e-3
"""What nobody's rounding has reached on a small copy: 2.7e-4 is the most that was seen."""
Proof = Callable[[PretrainedConfig, torch.dtype], float]


@dataclass(frozen=True)
class Adapted:
    """A small model with an adapter whose matrices are all random."""

    model: PeftModel
    loss: LossModel
    samples: list[Sample]

    @classmethod
    def of(cls, config: PretrainedConfig, recipe: Recipe = RECIPE, dtype: torch.dtype = torch.float32) -> Adapted:
        base = precise(config, dtype, SEGMENTS)
        model = trainable(base, recipe, Path(config.model_type))
        assert isinstance(model, PeftModel)
        for p in (p for p in model.parameters() if p.requires_grad):
            p.data = 0.1 * torch.randn_like(p, dtype=dtype)
        ids = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in LENGTHS]
        return cls(model, LossModel(model, recipe), [Sample(one, one) for one in ids])

    def hidden(self, samples: list[Sample]) -> torch.Tensor:
        """(length, width) of samples that share a row."""
        batch = inputs(collate([samples], 0, "packed"), "cpu")
        batch.pop("targets")
        self.model.eval()
        with torch.no_grad():
            return self.loss.hidden(**batch)[0]


def packed(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> float:
    return compared(config, "packed", dtype=dtype).worst


def padded(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> float:
    return compared(config, "padded", dtype=dtype).worst


def apart(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> float:
    small = Adapted.of(config, dtype=dtype)
    first, *others = small.samples
    changed = Sample([(one + 1) % VOCABULARY for one in first.ids], first.labels)
    before, after = (small.hidden([one, *others])[len(first.ids) :] for one in (first, changed))
    return relative(after, before)


def gradients(config: PretrainedConfig, _: torch.dtype = torch.float32) -> float:
    """The share of trained parameters that get none, or that should not be trained."""
    small = Adapted.of(config)
    batch = inputs(collate([small.samples], 0, "packed"), "cpu")
    small.loss(**batch)[0].backward()
    layers = [p for layer in text_layers(causal_model(small.model)) for p in layer.parameters()]
    inside = {id(p) for p in layers}
    trained = [(name, p) for name, p in small.model.named_parameters() if p.requires_grad]
    wrong = [
        name
        for name, p in trained
        if p.grad is None or not p.grad.abs().sum() > 0 or id(p) not in inside or ROUTERS & set(name.split("."))
    ]
    return len(wrong) / len(trained)


def merged(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> float:
    small = Adapted.of(config, dtype=dtype)
    before = small.hidden(small.samples)
    small.model.merge_adapter()
    return relative(small.hidden(small.samples), before)


def counted(config: PretrainedConfig, _: torch.dtype = torch.float32) -> float:
    small, shape = Adapted.of(config), model_shape(config)
    names = [(name, p.numel()) for name, p in small.model.named_parameters()]
    added = sum(count for name, count in names if ".lora_" in name)
    there = sum(count for _, count in names) - added
    facts = shape.facts(RECIPE)
    return max(abs(facts.parameters / there - 1), abs(facts.trainable / added - 1))


PROOFS: dict[str, Proof] = {
    "packed": packed,
    "padded": padded,
    "apart": apart,
    "gradients": gradients,
    "merged": merged,
    "counted": counted,
}


def proved(config: PretrainedConfig) -> dict[str, float]:
    """What each proof found. Raises what the libraries do where a small model cannot be built or trained."""
    return {name: _tried(proof, config) for name, proof in PROOFS.items()}


def _tried(proof: Proof, config: PretrainedConfig) -> float:
    """Where 32 bits give somewhat more than their rounding usually does, in 64: there what is rounded vanishes. On
    random weights some models enlarge it, Gemma 4 as wide as it is by a hundred."""
    found = _seeded(proof, config, torch.float32)
    if not LIMIT <= found < ROUNDED:
        return found
    try:
        return _seeded(proof, config, torch.float64)
    except BROKEN:
        return found  # some compute in 32 bits whatever they are given


def _seeded(proof: Proof, config: PretrainedConfig, dtype: torch.dtype) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return proof(config, dtype)


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((found - right).abs().max() / right.abs().max())
