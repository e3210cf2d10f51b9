"""deploy/files: units, configurations and programs for the nodes, as shell and text. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

FOLDER = Path(__file__).with_name("files")
MOUNT_POINT = "/data"


def text_of(name: str, **values: str) -> str:
    """A file's text; with values, those in place of its $names."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return Template(text).substitute(values) if values else text


def shell(*names: str, **values: object) -> str:
    """The shell scripts one after the other, with these values in their variables."""
    given = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())
    return given + "".join(text_of(name) for name in names)


def python(name: str, arguments: Sequence[str], interpreter: str) -> str:
    """Shell that runs a Python program with arguments, where nothing of ours is installed."""
    return shlex.join([interpreter, "-I", "-c", text_of(name), *arguments])
