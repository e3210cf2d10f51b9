"""Signals that end a program, as Ctrl-C does: what it has begun is ended in order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Inside, the first of these signals raises KeyboardInterrupt and others are not heard; then this program ends by
    that signal after all, so that whoever waits for it sees what ended it. One that is ignored, as under nohup, stays
    so."""
    mine = [each for each in ENDING_SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        for each in mine:
            signal.signal(each, signal.SIG_IGN)
        heard.append(number)
        raise KeyboardInterrupt

    for each in mine:
        signal.signal(each, hear)
    try:
        yield
    finally:
        for each in mine:
            signal.signal(each, signal.SIG_DFL)
        if heard:
            try:
                sys.stdout.flush()
            finally:  # also where the terminal is gone
                signal.raise_signal(heard[0])
