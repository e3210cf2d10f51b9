"""What a chat template can be given besides the conversation, by a recipe or by a record. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USUAL = ("enable_thinking", "reasoning_effort")
"""Those that most templates with thoughts read, one or the other."""
TAKEN = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""What transformers itself takes beside them, or a record says elsewhere."""


def wrong_args(args: Mapping[str, Any]) -> str:
    """What of the arguments no chat template can be given; empty where all can."""
    for name in args:
        if not name.isidentifier() or name in TAKEN:
            return f"{name!r} is nothing to give a chat template; {' and '.join(USUAL)} are, where it reads them"
    return ""
