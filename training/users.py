"""Who uses a node: asked by the laptop and by the head's own watch. Standard library only."""

from __future__ import annotations

_MODEL = "'[/]data/models/'"
USERS = f"who | sed 's/ .*/ is logged in/'; pgrep -f {_MODEL} >/dev/null && sleep 3; pgrep -af {_MODEL}; true"
"""Prints who is logged in and which programs have a base model loaded, those apart that are just ending; its own words
do not match."""


def first_user(answer: str) -> str:
    """Of what USERS printed: one that can be said; empty where nobody is there."""
    return answer.strip().splitlines()[0][:100] if answer.strip() else ""
