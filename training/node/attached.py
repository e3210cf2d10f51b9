"""A program that a control side talks with: JSON lines out, and it ends when its standard input does."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from training.text.problems import TrainingError


def tell(**message: Any) -> None:
    """One JSON line to whoever asked; in ASCII, as half a surrogate has no other form."""
    print(json.dumps(message), flush=True)


def end_with_input(take: Callable[[str], None] = lambda line: None) -> None:
    """Leave at once when standard input ends: whoever asked has gone, perhaps in the middle of an answer."""

    def listen() -> None:
        # not sys.stdin, which a fork closes, and could not while another thread reads from it
        with open(0, encoding="utf-8", closefd=False) as lines:
            for line in lines:
                take(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()


def run(work: Callable[[], None], attached: bool) -> int:
    """A program's exit code; a mistake is one sentence, told the way the caller listens."""
    try:
        work()
    except TrainingError as error:
        if attached:
            tell(mistake=str(error))
        else:
            print(error, file=sys.stderr)
        return error.exit_code
    return 0
