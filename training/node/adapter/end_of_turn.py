"""The token a tuned model ends its answers with: its chat template's, which a base model's own files may not name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from training.data import DataError
from training.data.encode import Encoder
from training.isolation import text_settings

GENERATION = "generation_config.json"


def end_of_turn_id(tokenizer: Any) -> int | None:
    """What a run teaches as the end of an answer; None where the tokenizer has nothing to end one with."""
    try:
        return Encoder(tokenizer, 1, "assistant").end_id
    except DataError:  # nothing was trained with such a tokenizer
        return None


def all_ids(*found: Any) -> frozenset[int]:
    """Token ids that configurations give as one number, as a list, or not at all."""
    each: Iterable[Any] = (one for some in found for one in (some if isinstance(some, list) else [some]))
    return frozenset(one for one in each if one is not None)


def name_end_of_turn(folder: Path, config: dict[str, Any]) -> None:
    """Have a model folder's generation settings end with the turn, beside what they ended with before."""
    if not any(folder.glob("tokenizer*")):  # and so no turns
        return
    from transformers import AutoTokenizer

    end = end_of_turn_id(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    path = folder / GENERATION
    own: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    before = own.get("eos_token_id", config.get("eos_token_id", text_settings(config).get("eos_token_id")))
    if end is None or end in all_ids(before):
        return
    own["eos_token_id"] = [end, *sorted(all_ids(before))]
    path.write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")
