"""What the proofs of a type of model found on a small copy of one, and how small it must be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.outline import Ask
from training.recipe import RecipeError

LIMIT = 1e-5
"""Of a proof, as in the tests of the types."""
ROUNDED = 1e-4
ROUNDING = frozenset({"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"})
"""Types whose logits may differ by ROUNDED, as in the look before each run: on random weights they enlarge what is
rounded, also in what they compute in 32 bits whatever they are given (26B-A4B: 3e-5, in 64 bits 1.1e-5)."""
OF_LOGITS = frozenset({"packed", "padded"})
PROOF, ZERO3 = "training.node.proof", "training.node.zero3_proof"
PROVING_S = 600.0


def limit_of(proof: str, kind: str) -> float:
    """What a proof's number must be below, for a model of this type."""
    return ROUNDED if kind in ROUNDING and proof in OF_LOGITS else LIMIT


def proved(folder: Path, config: Mapping[str, Any], ask: Ask, module: str = PROOF) -> dict[str, float]:
    """What each proof of a module found on a small copy of the model. RecipeError where one fails."""
    found, kind = ask(module, folder, PROVING_S), str(config.get("model_type"))
    if not found or not all(isinstance(value, float) and name.isidentifier() for name, value in found.items()):
        raise RecipeError(f"{folder.name}: the proofs of its type gave something else than numbers")
    limits = {name: limit_of(name, kind) for name in found}
    failed = [
        f"{name} {value:.1g}, {limits[name]:g} is allowed" for name, value in found.items() if not value < limits[name]
    ]
    if failed:
        raise RecipeError(f"it would learn something else than it says ({'; '.join(failed)})")
    return dict(found)


def parted(folder: Path, config: Mapping[str, Any], ask: Ask) -> dict[str, float]:
    """The same of ZeRO-3, which divides the model among the ranks: half a minute more, for whoever keeps a recipe."""
    return proved(folder, config, ask, ZERO3)
