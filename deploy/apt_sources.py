"""apt sources through a mirror, and back. Pure."""

from __future__ import annotations

import re

_HOST = r"(?:[\w-]+\.)*(?:ubuntu\.com|debian\.org|huaweicloud\.com|[\w-]*mirrors?[\w-]*\.[\w.-]+)(?::\d+)?"
_ARCHIVE = re.compile(rf"https?://{_HOST}/(debian|debian-security|ubuntu)(?=/?(?:\s|$))")
"""The distribution's own archives: at its own hosts, or at those that call themselves mirrors. Other vendors have such
folders too (packages.microsoft.com/ubuntu/22.04/prod, archive.canonical.com/ubuntu), which no mirror has."""


def through_mirror(text: str, mirror: str) -> str:
    """The sources file with the distribution's archives fetched from `mirror` (scheme and host).

    Only lines that name sources change; comments stay.
    """
    return "\n".join(
        line if line.lstrip().startswith("#") else _ARCHIVE.sub(rf"{mirror.rstrip('/')}/\1", line)
        for line in text.split("\n")
    )
