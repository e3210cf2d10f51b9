"""What a base model's small files say of it, on the Hub or in a folder, before its weights are anywhere."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from training.cost.memory import file_bytes
from training.cost.shape import PlanError
from training.data.turns import THOUGHT_KEYS, THOUGHT_MARK
from training.laptop.base_model import another_hub, hub_to_read
from training.models.derive import Source
from training.models.folder import shape_of
from training.models.hub import NO_ENTRY, Hub, HubError, SilentHubError, commit_id, file_name
from training.models.names import did_you_mean
from training.recipe.base import Base
from training.recipe.model_types import ADMITTED, QUANTIZED, not_admitted, stored_in, text_settings, untrainable
from training.recipe.recipe import RecipeError
from training.recipe.tables import USUAL
from training.text.counts import size_text
from training.text.files import GENERATION, TEMPLATES, is_one_of, model_files, object_in

TOKENIZER, CONFIG = "tokenizer_config.json", "config.json"
SMALL_FILES = (CONFIG, TOKENIZER, *TEMPLATES, GENERATION)
"""What is fetched of a model of the Hub before anything is rented."""
VOCABULARY = "tokenizer.json"
NUMBERED = "added_tokens_decoder"
"""Where tokenizer_config.json lists special tokens by their numbers; transformers 5 writes none there."""
LONGEST = 64
"""Letters of a token that is shown."""
UNUSED = ("right_pad", "<pad>", "[pad]", "reserved", "unused")
"""Parts of the names of special tokens that nothing else uses, the best for padding first."""
READ_AS_BFLOAT16 = {
    "float16": "Its files are stored in float16; they are read as bfloat16 (dtype), with fewer digits and no overflow.",
    "float32": "Its files are stored in float32, twice as large; they are read as bfloat16 (dtype), with fewer digits.",
}
"""What a recipe, whose dtype is bfloat16 whatever the files, says of those in another."""
NO_TEMPLATE = "It has no chat template (chat_template.jinja in its folder): only data of prompts and completions."


@dataclass(frozen=True)
class SmallFiles:
    """What a recipe is derived from, but for the model's shape."""

    source: Source
    config: Mapping[str, Any]


def read_small_files(
    base: Base, folder: Path, whose: str, *, licence: str = "", remarks: Sequence[str] = ()
) -> SmallFiles:
    """Those of `base`, which lie in `folder`; `remarks` begin what its recipe says. RecipeError where they cannot be
    read; `whose`: how the user calls the model."""
    config, template = read_json(folder / CONFIG, whose), template_of(folder, whose)
    note = " ".join([*remarks, *notes(config, template), *end_notes(folder, template)])
    pad = spare_pad(folder, template)
    return SmallFiles(Source(base, positions(config), licence, note, pad_token=pad), config)


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


GATED = "It is gated: set HF_TOKEN for the base deploy."


@cache
def looked_up(base: Base) -> SmallFiles:
    """A model of the Hub that can be trained, by its config.json. Raises RecipeError."""
    with tempfile.TemporaryDirectory() as folder:
        files = look_up(base, Path(folder))
    refuse_untrainable(base, files.config)
    return files


def look_up(base: Base, folder: Path) -> SmallFiles:
    """Its small files, brought into `folder`. Raises RecipeError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    repo = base.name
    try:
        hub = hub_to_read()
        info = hub.told(lambda token: HfApi(hub.address, token).model_info(repo))
        commit = commit_id(info.sha)
        files = {file_name(sibling.rfilename) for sibling in info.siblings or ()}
        for name in sorted(name for name in files if is_one_of(name, SMALL_FILES)):
            _fetch(hub, repo, commit, name, folder)
    except SilentHubError as error:
        raise RecipeError(f"{repo} cannot be looked up: {error}; {another_hub()}") from error
    except HubError as error:
        raise RecipeError(f"{repo} cannot be looked up: {error}") from error
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if status in NO_ENTRY:
            reason = hub.refusal(repo, status)
        raise RecipeError(f"{repo} cannot be looked up at {hub.address}: {reason}") from error
    gated = [GATED] if info.gated else []
    return read_small_files(base, folder, repo, licence=_licence(info.card_data), remarks=gated)


def _fetch(hub: Hub, repo: str, commit: str, name: str, folder: Path) -> None:
    from huggingface_hub import HfApi

    hub.asked(lambda token: HfApi(hub.address, token).hf_hub_download(repo, name, revision=commit, local_dir=folder))


def _licence(card: Any) -> str:
    """As its page says: the name where it is none of the Hub's own; empty where it says nothing."""
    licence = getattr(card, "license", None)
    named = getattr(card, "license_name", None) if licence == "other" else None
    return next((one for one in (named, licence) if isinstance(one, str) and one and one.isprintable()), "")


def refuse_untrainable(base: Base, config: Mapping[str, Any]) -> None:
    """RecipeError where it is no model that can be trained, by its config.json."""
    which = f"{base.name}: {did_you_mean(base.name)}"  # a recipe may be of a copy in 16 bits, or of its next of kin
    if reason := untrainable(config):
        raise RecipeError(f"{which}{reason}{in_16_bits(config)}")
    if (kind := config.get("model_type")) not in ADMITTED:
        raise RecipeError(f"{which}{not_admitted(str(kind))}")
