"""pyinfra's operations, for bodies that must not go on without an answer; and what nodes answer, as text.

pyinfra 3.10 prints a node's words as they are: an escape sequence would set a terminal's title or clipboard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import wraps
from io import StringIO
from typing import Any, ParamSpec

import click
from pyinfra import host, logger, state
from pyinfra.api import operation, output
from pyinfra.api.command import PyinfraCommand
from pyinfra.facts.files import FileContents
from pyinfra.operations import files

import deploy.clean_answers  # noqa: F401
from deploy.refusal import refuse
from inventory.shown import shown_in_colour

Given = ParamSpec("Given")
Commands = Iterator[str | PyinfraCommand]


def _plainly(record: logging.LogRecord) -> bool:
    record.msg, record.args = shown_in_colour(record.getMessage()), None
    return True


logger.addFilter(_plainly)
if output.is_output_active():  # pyinfra's own program runs us
    output.set_echo(lambda message="", **how: click.echo(shown_in_colour(str(message)), **how))


def node_operation(body: Callable[Given, Commands]) -> Callable[..., Any]:
    """`@operation()` for a body that ends where a fact failed, on this host alone.

    pyinfra 3.10 hands out a failed fact's default and lets the body go on: what is missing in the answer
    would look like missing on the node, and be written over.
    """

    @wraps(body)
    def careful(*args: Given.args, **kwargs: Given.kwargs) -> Commands:
        for command in body(*args, **kwargs):
            if host in state.failed_hosts:
                break
            yield command
        if host in state.failed_hosts:
            yield refuse(f"{host.name}: a question to this node got no answer; it was left as it is")

    return operation()(careful)


def file_text(path: str) -> str | None:
    """What a file of this node holds; None where there is no such file."""
    lines = host.get_fact(FileContents, path=path)
    return None if lines is None else "\n".join([*lines, ""])


def put_text(path: str, text: str, mode: str | None = "644") -> Commands:
    """A file of this node with this text, within an operation."""
    yield from files.put._inner(src=StringIO(text), dest=path, mode=mode)
