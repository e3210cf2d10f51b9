"""The row of long talks: rendering, finding the answers and tokenising, beside transformers' apply_chat_template, which
renders and tokenises and finds no answer. Each length is a shape of its own. The row's seconds are of the longest talk,
its ratio is the worst of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.rows import Group, Measure, Row, compared
from training.models import tiny

TURNS = (100, 400, 1600)
RUNS = 5


def _talk(turns: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[k % 2], "content": f"{'word ' * 30}{k}"} for k in range(turns)]


def _seconds(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _measured(tokenizer: Any) -> Row:
    from training.data.encode import Encoder
    from training.data.shapes import recognised

    parts: dict[str, float] = {}
    for turns in TURNS:
        talk = _talk(turns)
        pairs: dict[str, list[tuple[float, float]]] = {"first": [], "again": []}
        for _ in range(RUNS):
            encoder = Encoder(tokenizer, 1_000_000, "assistant")
            for pair in pairs.values():
                mine = _seconds(lambda: encoder.samples(encoder.rendered(recognised({"messages": talk}))))  # noqa: B023
                pair.append((mine, _seconds(lambda: tokenizer.apply_chat_template(talk, tokenize=True))))  # noqa: B023
        rows = {name: compared(pair) for name, pair in pairs.items()}
        parts |= {f"{turns} turns, {name}": row["ratio"] for name, row in rows.items()}
    return {**rows["first"], "ratio": min(parts.values()), "parts": parts}


@contextmanager
def ready(folder: Path) -> Iterator[Mapping[str, Measure]]:
    """A tokenizer, warm."""
    tokenizer = tiny.tokenizer()
    tokenizer.apply_chat_template(_talk(TURNS[0]), tokenize=True)
    yield {"long_talks": lambda: _measured(tokenizer)}


GROUP = Group(("long_talks",), ready)
