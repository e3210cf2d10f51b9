"""A folder of the user's machine to a node: whole files, told apart by content; what lies there is not sent again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pyinfra.api import FactBase, FileUploadCommand

from training.sums import parse_sums, sha256_of

HALF = ".sending"
"""The file that is on its way."""


class FileSums(FactBase[dict[str, str]]):
    """The sha256 of every file in a folder of the node by its name."""

    default = dict

    @staticmethod
    def command(path: str) -> str:
        return f"cd {shlex.quote(path)} 2>/dev/null && sha256sum -- * 2>/dev/null; true"

    @staticmethod
    def process(lines: Iterable[str]) -> dict[str, str]:
        return parse_sums("\n".join(lines))


def send_commands(files: Iterable[Path], path: str, there: Mapping[str, str]) -> Iterator[str | FileUploadCommand]:
    """What makes the folder `path` of the node, in which `there` lies (FileSums), hold these files and no others."""
    here = {file.name: file for file in files}
    stale = [name for name in there if name not in here]
    yield f"cd {shlex.quote(path)} && {shlex.join(['rm', '-f', '--', *stale, HALF])}"
    for name, file in here.items():
        if there.get(name) == sha256_of(file):
            continue
        # moved in one step: what lies there under its name is whole
        yield FileUploadCommand(str(file), f"{path}/{HALF}")
        yield shlex.join(["mv", "--", f"{path}/{HALF}", f"{path}/{name}"])
