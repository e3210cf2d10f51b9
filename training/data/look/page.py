"""A look at data as a page: complete in itself, without scripts. Needs jinja2, which both sides have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from training.counting import size_text
from training.data.look.content import Look, remarks
from training.data.look.naming import named
from training.words import ENGLISH, Words

FOLDER = Path(__file__).parent
PAGE, BODY = "page.html.jinja", "body.html.jinja"

_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and what turns the direction of writing: as inventory.shown has them for terminals."""


def visible(value: Any) -> Any:
    """For a page's every value: characters that are to be seen and not obeyed, written out; markup as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), value)


def page(look: Look, data: str, say: Words = ENGLISH) -> str:
    """The page; all that comes from files is escaped. `data`: what the data are called."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    room = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    room.filters["size"] = size_text
    said = list(remarks(look, say))
    return room.get_template(PAGE).render(name=data or look.model, look=named(look, None, say), remarks=said, say=say)
