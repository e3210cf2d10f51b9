"""The head is told until when the machines are rented: a run saves and leaves before that."""

from __future__ import annotations

import shlex
from datetime import datetime

from training.control.head_node import Head
from training.supervision.reclaim import FOLDER, RELEASE, release_text


def tell(head: Head, at: datetime) -> None:
    """Write the release time where a run's supervisor looks for it. Raises HeadError."""
    there, text = FOLDER / RELEASE, shlex.quote(release_text(at.timestamp()))
    head.shell(f"mkdir -p {FOLDER} && echo {text} >{there}.new && mv {there}.new {there}")
