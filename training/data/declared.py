"""A tokenizer by its tokenizer_config.json alone, as far as a chat template asks for it: what ends an answer is known
before its vocabulary was fetched. All the file holds is data: what is no token, or no id, is passed over."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.data.sample import DataError
from training.data.template import ChatTemplate

LONGEST = 64
"""Letters of a token that is shown."""
NUMBERED = "added_tokens_decoder"
"""Where tokenizer_config.json lists special tokens by their numbers; transformers 5 writes none there."""
LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class Declared:
    """What of a tokenizer its file declares."""

    chat_template: str
    special_tokens_map: Mapping[str, str]
    """By what they are for, as eos_token."""
    all_special_tokens: Sequence[str]
    ids: Mapping[str, int]
    """Of those that are listed with their numbers."""

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """None besides."""
        return {}

    def get_chat_template(self, *_: Any) -> str:
        """As a tokenizer has it."""
        return self.chat_template

    def apply_chat_template(self, turns: list[Any], **given: Any) -> str:
        """The conversation's text. ImportError without transformers, whose sandbox renders it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        given.pop("tokenize", None)
        texts, _ = render_jinja_template([turns], chat_template=self.chat_template, **self.special_tokens_map, **given)
        return str(texts[0])

    def end_of_turn(self) -> str:
        """What the template ends an answer with, found as a run finds it; empty where it cannot be tried out here."""
        try:
            return ChatTemplate(self).facts.end_of_turn or ""
        except DataError:
            return ""


def declared(found: Mapping[str, Any], template: str, added: Any = ()) -> Declared:
    """The tokenizer of a tokenizer_config.json. `template`: its chat template, which may lie beside it; `added`: the
    added_tokens of a tokenizer.json, where that does not list them."""
    named = {key: _token(value) for key, value in found.items() if key.endswith("_token")}
    lists = [value for key in LISTS for value in _each(found.get(key))]
    numbered = {
        _token(value): int(number)
        for number, value in (_table(found.get(NUMBERED)) or _by_number(added)).items()
        if re.fullmatch("[0-9]{1,9}", number) and _table(value).get("special") is True
    }
    return Declared(
        chat_template=_default(template, found.get("chat_template")),
        special_tokens_map={key: token for key, token in named.items() if token},
        all_special_tokens=sorted({*named.values(), *map(_token, lists), *numbered} - {""}),
        ids=numbered,
    )


def _by_number(added: Any) -> dict[str, Any]:
    return {str(one.get("id")): one for one in map(_table, _each(added))}


def _default(template: str, said: Any) -> str:
    """Of several templates the one for plain conversations."""
    if not isinstance(said, list) or template != json.dumps(said):
        return template
    texts = {str(one.get("name")): one.get("template") for one in map(_table, said)}
    return text if isinstance(text := texts.get("default"), str) else template


def _token(value: Any) -> str:
    """A token as it is written, by itself or with its habits; empty where it is none that can be shown."""
    text = _table(value).get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text.isprintable() and len(text) <= LONGEST else ""


def _each(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
