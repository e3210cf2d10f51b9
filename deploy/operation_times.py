"""How long the groups of a deploy's operations took, for whoever started pyinfra and named a file for that.

One line of JSON each group: its name and two moments in seconds since 1970.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from pyinfra import state
from pyinfra.api import Host
from pyinfra.api.state import BaseStateCallback, State

FILE_VARIABLE = "SPOTUNE_OPERATION_TIMES"


class Stopwatch(BaseStateCallback):
    """Writes a line after each operation, and where one fails, so that a deploy that fails has told what it did."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.began: dict[str, float] = {}

    def operation_start(self, state: State, op_hash: str) -> None:
        self.began[op_hash] = time.time()

    def operation_host_error(
        self, state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        self.operation_end(state, op_hash)  # which is not called where no host is left

    def operation_end(self, state: State, op_hash: str) -> None:
        names = state.get_op_meta(op_hash).names
        group = min(names).partition(" | ")[0] if names else "?"
        line = json.dumps({"group": group, "began": self.began[op_hash], "ended": time.time()})
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def tell_operation_times() -> None:
    """Measure this deploy where its caller asks for that."""
    file = os.environ.get(FILE_VARIABLE)
    if file and not any(isinstance(each, Stopwatch) for each in state.callback_handlers):  # asked once a host
        state.add_callback_handler(Stopwatch(Path(file)))
