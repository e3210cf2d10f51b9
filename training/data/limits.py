"""What the base model can take: rows of its embedding, positions. Held against tokens before a rank would fail on them.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.data.sample import DataError
from training.recipe.recipe import Recipe


def check_settings(config: Mapping[str, Any], recipe: Recipe, tokenizer: Any, pad_id: int, end_id: int | None) -> None:
    """DataError where the recipe, by the tokenizer, asks for what the model of config.json does not have."""
    name = str(recipe.base_model)
    most = positions(config)
    if most is not None and recipe.max_length > most:
        raise DataError(
            f"max_length {recipe.max_length} is more than the {most} positions of {name}; --set max_length={most}"
        )
    cure = "--set pad_token=TOKEN with another token of its vocabulary"
    _refuse_beyond(config, name, f"the pad token {_named(tokenizer, pad_id)}", pad_id, cure)
    if recipe.tuning == "lora":
        vocabulary = tokenizer.get_vocab()
        for token in recipe.lora.trainable_tokens:
            if token not in vocabulary:
                raise DataError(f"lora.trainable_tokens: {name} has no token {token!r}; remove it, or correct its name")
            cure = "take it out of lora.trainable_tokens"
            _refuse_beyond(config, name, f"the trainable token {token!r}", vocabulary[token], cure)
    if end_id is not None:
        cure = "take a model whose tokenizer is its own"
        _refuse_beyond(config, name, f"the end of turn {_named(tokenizer, end_id)}", end_id, cure)


def check_ids(config: Mapping[str, Any], recipe: Recipe, tokenizer: Any, largest_id: int) -> None:
    """DataError where a token of the prepared data has no row in the embedding."""
    cure = (
        "its tokenizer has tokens the model does not: take a model whose tokenizer is its own, or leave the token out"
    )
    what = f"the token {_named(tokenizer, largest_id)} of the data"
    _refuse_beyond(config, str(recipe.base_model), what, largest_id, cure)


def _refuse_beyond(config: Mapping[str, Any], name: str, what: str, number: int, cure: str) -> None:
    rows = _number(config.get("text_config") or {}, "vocab_size") or _number(config, "vocab_size")
    if rows is not None and not 0 <= number < rows:
        raise DataError(f"{what} has the id {number}, but the embedding of {name} ends with {rows - 1}; {cure}")


def _named(tokenizer: Any, number: int) -> str:
    return repr(tokenizer.convert_ids_to_tokens(number))


def positions(config: Mapping[str, Any]) -> int | None:
    """The longest text a model was made for, with what its rotary embedding is stretched to; None where it has no
    such end."""
    inner = config if "text_config" not in config else config["text_config"] or {}
    most = _number(inner, "max_position_embeddings") or _number(inner, "n_positions")
    stretched = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    original, factor = stretched.get("original_max_position_embeddings"), stretched.get("factor")
    if most is None or not isinstance(original, int) or not isinstance(factor, int | float):
        return most
    return max(most, int(original * factor))


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else None
