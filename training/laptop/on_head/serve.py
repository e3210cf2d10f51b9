"""Questions and answers in lines of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from training.laptop.on_head import fs, machines, run_folders

PIECE = 1 << 20
"""Characters of an answer on one line."""
VERBS: dict[str, Callable[..., Any]] = {
    name: verb
    for room in (fs, machines, run_folders)
    for name, verb in vars(room).items()
    if isinstance(verb, FunctionType) and verb.__module__ == room.__name__
}


def serve() -> None:
    """Answer until the questions end."""
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"answer": VERBS[question["verb"]](*question["arguments"], **question["named"])}
        except Exception as error:  # what it is, the laptop says
            answer = {"error": str(error) or type(error).__name__}
        content = json.dumps(answer)
        for at in range(0, len(content), PIECE):
            print(json.dumps({"piece": content[at : at + PIECE], "more": at + PIECE < len(content)}), flush=True)
