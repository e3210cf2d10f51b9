"""A line that says what is being waited for and how far it is. rich is imported where used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inventory.shown import console

PLAIN_EVERY_S = 5.0
Show = Callable[[str, float | None], None]
"""What is being waited for, and how much of it is done (0 to 1), where known."""


@contextmanager
def progress() -> Iterator[Show]:
    """A function for words and a share done: a bar in a terminal, a line now and then elsewhere."""
    terminal = console()
    if not terminal.is_terminal:
        yield _plain()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        BarColumn(30), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def show(words: str, share: float | None) -> None:
            bar.update(task, description=words, total=None if share is None else 1.0, completed=share or 0.0)

        yield show


def _plain() -> Show:
    said: dict[str, float | str] = {"words": "", "at": 0.0}

    def show(words: str, share: float | None) -> None:
        due = time.monotonic() - float(said["at"]) > PLAIN_EVERY_S
        if words != said["words"] and (due or share == 1.0):
            print(words, flush=True)
            said.update(words=words, at=time.monotonic())

    return show
