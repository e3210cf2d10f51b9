"""What in a record is no text: images, videos and sounds, from which nothing is learned here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.data.sample import BadRecord

COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""What records call them beside their turns."""


def refuse_media(record: Mapping[str, Any]) -> None:
    """BadRecord for a record whose words are about what a model would not be shown."""
    if found := [name for name in COLUMNS if record.get(name)]:
        raise BadRecord(f"it has {' and '.join(found)}, and text alone is learned; leave such records out")


def refuse_parts(content: Any, place: int) -> None:
    """BadRecord for the content of a turn that, in parts as models that see take it, has others than text."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    kinds = dict.fromkeys(str(part.get("type")) for part in parts)
    if found := [kind for kind in kinds if kind != "text"]:
        raise BadRecord(
            f"turn {place} has {' and '.join(found)} in its content, and text alone is learned; leave such records out"
        )
