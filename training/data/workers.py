"""Work on one piece after another, spread over the cores of a machine, with the results in order."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from ctypes import CDLL
from multiprocessing import get_context
from typing import Any, TypeVar

from training.data.sample import DataError
from training.data.source import DataFile

Piece = TypeVar("Piece")
Result = TypeVar("Result")
WORTH = 4 * 2**20
"""Bytes of data below which no process is started for them."""
MOST = 16
"""Processes; more would wait for the one that reads and writes."""
_PR_SET_PDEATHSIG = 1
_work: Callable[[Any], Any]
"""In a process of these: what it does with each piece."""


def processes_for(files: Sequence[DataFile]) -> int:
    """How many are worth it. Elsewhere than on Linux what is loaded here may not work in a copy of this process."""
    if sys.platform != "linux" or sum(file.path.stat().st_size for file in files) < WORTH:
        return 1
    return min(len(os.sched_getaffinity(0)), MOST)


def in_order(work: Callable[[Piece], Result], pieces: Iterable[Piece], processes: int) -> Iterator[Result]:
    """What `work` gives for each piece. With several `processes`, which are copies of this one, only pieces and results
    go between them, and few at a time. DataError where one of them is killed."""
    if processes < 2:
        yield from map(work, pieces)
        return
    pool = ProcessPoolExecutor(processes, get_context("fork"), _begin, (work, os.getpid()))
    waiting = deque[Future[Result]]()
    try:
        for piece in pieces:
            waiting.append(pool.submit(_done, piece))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that was reading the data was killed, probably because the machine ran out of memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    """It ends with its parent, however that ends, which alone is told of Ctrl-C; it has one core."""
    global _work  # noqa: PLW0603 - a process's own
    CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work = work


def _done(piece: Any) -> Any:
    return _work(piece)
