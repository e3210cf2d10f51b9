"""pyinfra's operations, for bodies that must not go on without an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from io import StringIO
from typing import Any, ParamSpec

from pyinfra import host, state
from pyinfra.api import operation
from pyinfra.api.command import PyinfraCommand
from pyinfra.facts.files import FileContents
from pyinfra.operations import files

import deploy.clean_answers  # noqa: F401
from deploy.refusal import refuse

Given = ParamSpec("Given")
Commands = Iterator[str | PyinfraCommand]


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
