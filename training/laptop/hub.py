"""The model hub as this machine reads it, and what a base model's small files say, on the Hub or in a folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from inventory.settings import SettingsError, load_settings
from training.cost.memory import file_bytes
from training.cost.shape import PlanError
from training.data.turns import THOUGHT_KEYS, THOUGHT_MARK
from training.models.folder import shape_of
from training.models.hub import Hub, hub_at, hub_of
from training.recipe.model_types import ADMITTED, QUANTIZED, stored_in, text_settings, untrainable
from training.recipe.recipe import RecipeError
from training.recipe.tables import USUAL
from training.text.counts import size_text
from training.text.files import TEMPLATES, model_files, object_in

ADDRESS = "HF_ENDPOINT"
"""Environment variable of the hub's own client."""


def hub_address() -> str:
    """HF_ENDPOINT's; without it that of [mirrors] in cluster.toml; empty: the Hub itself. Raises SettingsError."""
    return os.environ.get(ADDRESS) or load_settings().mirrors.resolved().hub


def mirror() -> str:
    """The same, for a command that is shown: without readable settings the Hub itself."""
    try:
        return hub_address()
    except SettingsError:
        return ""


def download_command(arguments: str, address: str) -> str:
    """What fetches a model by hand, from the hub at `address` where that is not the Hub itself."""
    return f"{ADDRESS}={shlex.quote(address)} hf download {arguments}" if address else f"hf download {arguments}"


def hub_to_read() -> Hub:
    """The hub there, with this machine's token where that is meant for it. Raises HubError and SettingsError."""
    from huggingface_hub import get_token

    return hub_of(os.environ | {ADDRESS: hub_address()}, get_token())


def another() -> str:
    """How another hub is named, where this one does not answer."""
    named = hub_at(hub_address(), None, "").another
    return f"{ADDRESS} names it; without that {named}" if os.environ.get(ADDRESS) else named


READ_AS_BFLOAT16 = {
    "float16": "Its files are stored in float16; they are read as bfloat16 (dtype), with fewer digits and no overflow.",
    "float32": "Its files are stored in float32, twice as large; they are read as bfloat16 (dtype), with fewer digits.",
}
"""What a recipe, whose dtype is bfloat16 whatever the files, says of those in another."""


NO_TEMPLATE = "It has no chat template (chat_template.jinja in its folder): only data of prompts and completions."


def cached_outlines() -> Path:
    """Where what was counted on this machine is kept."""
    return Path.home() / ".cache" / "spotune" / "outlines"


def read_json(path: Path, whose: str) -> dict[str, Any]:
    """RecipeError where it cannot be read; `whose`: how the user calls the model."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise RecipeError(f"{whose}: its {path.name} cannot be read: {error}") from error


def template_of(folder: Path, whose: str) -> str:
    """How the model writes a conversation; empty where it says nothing. Raises RecipeError."""
    if own := model_files(folder, TEMPLATES):
        return "\n".join((folder / name).read_text(encoding="utf-8") for name in own)
    if not (folder / "tokenizer_config.json").is_file():
        return ""
    template = read_json(folder / "tokenizer_config.json", whose).get("chat_template")
    return template if isinstance(template, str) else json.dumps(template) if template else ""


def positions(config: Mapping[str, Any]) -> int:
    """How many tokens it reads at most; 2048 where it does not say."""
    limit = text_settings(config).get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 else 2048


def notes(config: Mapping[str, Any], template: str) -> list[str]:
    """Sentences for whoever opens the recipe."""
    stored = [READ_AS_BFLOAT16[dtype]] if (dtype := stored_dtype(config)) in READ_AS_BFLOAT16 else []
    without = [] if template else [NO_TEMPLATE]
    return stored + without + _thinks(template)


def _thinks(template: str) -> list[str]:
    """What its template knows of thoughts, by the names that stand in it."""
    read = [name for name in (*USUAL, *THOUGHT_KEYS) if re.search(rf"\b{name}\b", template)]
    if not read and not THOUGHT_MARK.search(template):
        return []
    switched = f"; --set template_args.{read[0]}=VALUE switches them" if read and read[0] in USUAL else ""
    return [f"Its template knows thoughts{switched}."]


def stored_dtype(config: Mapping[str, Any]) -> str:
    """What its weights are stored in; empty where it does not say."""
    dtypes = (part.get(key) for part in (config, text_settings(config)) for key in ("dtype", "torch_dtype"))
    return next((one for one in dtypes if isinstance(one, str)), "")


def in_16_bits(config: Mapping[str, Any]) -> str:
    """What weights of fewer bits take in 16; empty where these have as many, or where that cannot be counted."""
    plain = _without(config, QUANTIZED)
    if not stored_in(config) or untrainable(plain) or plain.get("model_type") not in ADMITTED:
        return ""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        try:
            shape = shape_of(folder, cached_outlines())
        except PlanError:
            return ""
    return f" (in 16 bits it takes {size_text(file_bytes(shape), 1000)}: look on the Hub for a copy in BF16)"


def _without(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A config.json without some of its keys, nor those of its text's part."""
    text = {"text_config": _without(inner, keys)} if isinstance(inner := config.get("text_config"), Mapping) else {}
    return {key: value for key, value in config.items() if key not in keys} | text


TOKENIZER, CONFIG = "tokenizer_config.json", "config.json"
VOCABULARY = "tokenizer.json"
NUMBERED = "added_tokens_decoder"
"""Where tokenizer_config.json lists special tokens by their numbers; transformers 5 writes none there."""
LONGEST = 64
"""Letters of a token that is shown."""
UNUSED = ("right_pad", "<pad>", "[pad]", "reserved", "unused")
"""Parts of the names of special tokens that nothing else uses, the best for padding first."""


def end_notes(folder: Path, template: str) -> list[str]:
    """A sentence on what fills rows up; none where the files in `folder` do not say. `template`: how the model writes a
    conversation."""
    named = _named(object_in(folder / TOKENIZER, json.loads))
    if pad := named.get("pad_token"):
        return [f"The padding token is {pad}."]
    if spare := spare_pad(folder, template):
        return [f"{TOKENIZER} names no padding token: {spare}, which nothing else uses, is taken (pad_token)."]
    eos = named.get("eos_token")
    return [f"{TOKENIZER} names no padding token: {eos}, its end of text, is taken; pad_token sets another."] * bool(
        eos
    )


def spare_pad(folder: Path, template: str) -> str:
    """The token that a recipe names for padding where the tokenizer in `folder` names none and has one to spare; else
    empty. The end of text, where it is learned, must not be hidden as padding is."""
    tokenizer_config = object_in(folder / TOKENIZER, json.loads)
    named = _named(tokenizer_config)
    if "pad_token" in named:
        return ""
    listed = tokenizer_config.get(NUMBERED)
    if NUMBERED not in tokenizer_config:  # elsewhere in a file of many megabytes, which only a folder has
        listed = object_in(folder / VOCABULARY, json.loads).get("added_tokens")
    each = list(listed.values()) if isinstance(listed, dict) else listed if isinstance(listed, list) else []
    special = [_token(one) for one in each if isinstance(one, dict) and one.get("special") is True]
    free = [one for one in special if one and one not in named.values() and one not in template]
    return next((token for word in UNUSED for token in free if word in token.lower()), "")


def _named(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by what they are for, as eos_token."""
    return {
        key: token for key, value in tokenizer_config.items() if key.endswith("_token") and (token := _token(value))
    }


def _token(value: Any) -> str:
    """A token as it is written, by itself or with its settings; empty where it is none that can be shown."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text.isprintable() and len(text) <= LONGEST else ""
