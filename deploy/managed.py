"""The small files of a node that a base deploy writes.

pyinfra 3.10 asks for a file's state, its folder's and its sum, a command each: over a slow line most of a deploy
that changes nothing. Here one command reads all of them, once more after something was changed.
"""

from __future__ import annotations

import binascii
import shlex
from base64 import b64decode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import StringIO

from pyinfra import host
from pyinfra.api import FactBase
from pyinfra.api.exceptions import FactProcessError
from pyinfra.facts.files import FileContents
from pyinfra.operations import files

from deploy.node_operation import Commands, known, node_operation

_PATHS: list[str] = []


def managed(path: str) -> str:
    """The path of a file that is read with all others of its kind; said when its module is imported."""
    _PATHS.append(path)
    return path


class ManagedFiles(FactBase[dict[str, tuple[str, str] | None]]):
    """(mode, text) of each of these files; None for one that is not there. One that is no UTF-8 is left out."""

    @staticmethod
    def default() -> dict[str, tuple[str, str] | None]:
        return {}

    def command(self, paths: Sequence[str]) -> str:
        read = 'mode=$(stat -Lc %a "$file") && text=$(base64 -w0 "$file") || exit'
        each = f'if [ -f "$file" ]; then {read}; echo "$mode $file $text"; else echo "- $file"; fi'
        return f"for file in {shlex.join(paths)}; do {each}; done"

    def process(self, output: Iterable[str]) -> dict[str, tuple[str, str] | None]:
        found: dict[str, tuple[str, str] | None] = {}
        for line in output:
            mode, path, content = f"{line}   ".split(" ")[:3]
            with suppress(UnicodeDecodeError):
                found[path] = None if mode == "-" else (mode, _decoded(content))
        return found


def _decoded(content: str) -> str:
    try:
        return b64decode(content, validate=True).decode("utf-8")
    except binascii.Error as error:
        raise FactProcessError(f"a file's content came incomplete: {error}") from None


def _read(path: str) -> tuple[bool, tuple[str, str] | None]:
    """Whether a file was read with the others, and what was read."""
    found = known(ManagedFiles, paths=tuple(_PATHS)) if path in _PATHS else {}
    return path in found, found.get(path)


def file_text(path: str) -> str | None:
    """What a file of this node holds, its last line ended; None where there is no such file."""
    was_read, about = _read(path)
    if was_read:
        text = about and about[1]
        return f"{text}\n" if text and not text.endswith("\n") else text
    lines = host.get_fact(FileContents, path=path)
    return None if lines is None else "\n".join([*lines, ""])


def put_text(path: str, text: str, mode: str | None = "644") -> Commands:
    """A file of this node with this text, within an operation."""
    _, about = _read(path)
    if about and about[1] == text and mode in (None, about[0]):
        host.noop(f"{path} is as it should be")
        return
    yield from files.put._inner(src=StringIO(text), dest=path, mode=mode)


@node_operation
def keep_file(path: str, text: str) -> Commands:
    """A file of this node with this text, for all to read."""
    yield from put_text(path, text)
