"""Where this user's commands keep what they remember between two calls. Imports nothing: `fab --list` reads it too."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """By the XDG base directory specification; made by whoever writes there."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "spotune"
