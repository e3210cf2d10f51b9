"""A look at data as a page: complete in itself, without scripts. Needs jinja2, which both sides have."""

from __future__ import annotations

from pathlib import Path

from training.data.look.content import Look, remarks

FOLDER = Path(__file__).parent
PAGE, BODY = "page.html.jinja", "body.html.jinja"


def page(look: Look, data: str) -> str:
    """The page; all that comes from files is escaped. `data`: what the data are called."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    room = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return room.get_template(PAGE).render(name=data or look.model, look=look, remarks=list(remarks(look)))
