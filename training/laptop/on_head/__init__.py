"""What a head answers: the laptop sends this code over ssh and asks (head_node.py); `--here` calls it.

Standard library of Python 3.9 alone. A verb takes and gives what JSON has, and its annotation is the contract by which
the laptop checks an answer. OSError is the head's trouble, in words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from training.laptop.on_head import fs, machines, run_folders

PIECE = 1 << 20
"""Characters of an answer on one line."""
VERBS: dict[str, Callable[..., Any]] = {
    verb.__name__: verb for module in (fs, machines, run_folders) for verb in module.VERBS
}


def serve() -> None:
    """Answer until the questions end."""
    for line in sys.stdin:
        question = json.loads(line)
        try:
            content = json.dumps({"answer": VERBS[question["verb"]](*question["arguments"], **question["named"])})
        except Exception as error:
            content = json.dumps({"error": words(error, question["arguments"])})
        for at in range(0, len(content), PIECE):
            print(json.dumps({"piece": content[at : at + PIECE], "more": at + PIECE < len(content)}), flush=True)


def words(error: Exception, arguments: Any) -> str:
    """Why a verb could not do it, for people."""
    if not (isinstance(error, OSError) and error.strerror):
        return str(error) or type(error).__name__
    return ": ".join(map(str, [error.filename or next(iter(arguments), ""), error.strerror]))
