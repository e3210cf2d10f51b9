"""Packages that this process does without, though they are installed: they take seconds to import."""

from __future__ import annotations

import importlib.util
import sys

VARIABLE = "SPOTUNE_WITHOUT"
"""In the environment of a program: the packages that it hides, with blanks between them."""
HIDDEN: set[str] = set()
"""They are as if they were not installed, for this process alone."""


def hide(*packages: str) -> None:
    """From here on; one that was imported before stays."""
    for name in packages:
        if name not in sys.modules and importlib.util.find_spec(name):
            HIDDEN.add(name)
            sys.modules[name] = None  # type: ignore[assignment]  # this is how an import is told to find nothing
