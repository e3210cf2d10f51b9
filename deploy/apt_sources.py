"""apt sources through a mirror, and back. Pure."""

from __future__ import annotations

import re

_ARCHIVE = re.compile(r"https?://[^/\s]+/(debian|debian-security|ubuntu)(?=[/\s]|$)")
"""The distribution's own archives, whoever serves them; other repositories have other paths."""


def through_mirror(text: str, mirror: str) -> str:
    """The sources file with the distribution's archives fetched from `mirror` (scheme and host).

    Only lines that name sources change; comments stay.
    """
    return "\n".join(
        line if line.lstrip().startswith("#") else _ARCHIVE.sub(rf"{mirror.rstrip('/')}/\1", line)
        for line in text.split("\n")
    )
