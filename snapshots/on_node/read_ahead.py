"""Read files of a lazy disk, so that training need not wait for them. A program for the node. Standard library only.

    python3 -c THIS '{"groups": [["environment", ["/data/env"]], ...], "readers": 8}'

A disk made from a snapshot fetches each block from far away when it is first read; several readers at once hide
most of the way there. Groups in their order, large files in pieces. Prints a line of JSON now and then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

PIECE = 64 << 20
CHUNK = 1 << 20
TELL_EVERY_S = 0.5
NICENESS = 19
"""It waits for a disk most of the time; the base deploy beside it has work for the processor."""


def end_with_input() -> None:
    """Leave at once when whoever asked has gone."""

    def listen() -> None:
        while os.read(0, 4096):  # unbuffered: a lock held by a thread at the end would abort the interpreter
            pass
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


def pieces(paths: list[str]) -> Iterator[tuple[Path, int, int]]:
    """(file, from, bytes) of every file below the paths; links are not followed."""
    for top in paths:
        for parent, folders, names in os.walk(top):
            folders.sort()
            for name in sorted(names):
                file = Path(parent) / name
                if file.is_file() and not file.is_symlink():
                    size = file.stat().st_size
                    yield from ((file, at, min(PIECE, size - at)) for at in range(0, size, PIECE))


class Reading:
    """How much has been read of how much."""

    def __init__(self, groups: list[tuple[str, list[str]]]) -> None:
        self.groups = [(label, list(pieces(paths))) for label, paths in groups]
        self.total = sum(size for _, parts in self.groups for *_, size in parts)
        self.done = 0
        self.label = self.groups[0][0] if self.groups else ""
        self._lock = threading.Lock()

    def read(self, piece: tuple[Path, int, int]) -> None:
        """One piece; a file that went away meanwhile is none of ours."""
        file, at, size = piece
        try:
            with file.open("rb", buffering=0) as source:
                source.seek(at)
                left = size
                while left > 0 and (data := source.read(min(CHUNK, left))):
                    left -= len(data)
                    with self._lock:
                        self.done += len(data)
        except FileNotFoundError:
            pass

    def tell(self) -> None:
        print(json.dumps({"label": self.label, "done": self.done, "total": self.total}), flush=True)

    def keep_telling(self) -> None:
        while True:
            time.sleep(TELL_EVERY_S)
            self.tell()


def main(question: dict[str, Any]) -> None:
    os.nice(NICENESS)
    end_with_input()
    reading = Reading([(label, paths) for label, paths in question["groups"]])
    reading.tell()
    threading.Thread(target=reading.keep_telling, daemon=True).start()
    with ThreadPoolExecutor(question["readers"]) as pool:
        for label, parts in reading.groups:
            reading.label = label
            done, _ = wait([pool.submit(reading.read, piece) for piece in parts])
            for one in done:
                one.result()
    reading.tell()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
