"""Files and folders of a head, and what else it is asked about them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Union

StrPath = Union[str, "os.PathLike[str]"]
SMALL, MOST = 1 << 18, 48 << 20
"""Bytes that are read of a small file, and of any."""
BLOCK = 1 << 20


def text(path: StrPath, last: int = 0) -> str | None:
    """What a file holds, with `last` its last bytes alone; None where there is no regular file."""
    content = read(path, last)
    return None if content is None else content.decode("utf-8", "replace")


def read(path: StrPath, last: int = 0, most: int = MOST) -> bytes | None:
    """The same in bytes, `most` of them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # of a pipe an open would wait for its writer
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return None
        if last:
            file.seek(max(0, about.st_size - last))
        return file.read(most)


def small(path: StrPath) -> str:
    """What a small file holds; nothing where it cannot be read."""
    try:
        return (read(path, most=SMALL) or b"").decode("utf-8", "replace")
    except OSError:
        return ""


def names(folder: StrPath) -> list[str]:
    """What is in a folder, sorted; nothing where there is none."""
    return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []


def newest(folder: StrPath, pattern: str, most: int) -> list[str]:
    """What the newest files below a folder hold that match, the newest first."""
    paths = [path for path in Path(folder).glob(pattern) if path.is_file()]
    contents = map(text, sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[:most])
    return [content for content in contents if content is not None]


def matches(path: StrPath, pattern: str) -> list[str]:
    """Each place of a file that matches, in their order."""
    return [found[0] for found in re.finditer(pattern, text(path) or "")]


def exists(path: StrPath) -> bool:
    return Path(path).exists()


def executable(path: StrPath) -> bool:
    return os.access(path, os.X_OK)


def sha256(path: StrPath) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write(path: StrPath, content: str) -> None:
    """Replace a small file at once; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(content, encoding="utf-8")
    new.replace(path)


def rename(source: StrPath, target: StrPath) -> None:
    Path(source).replace(target)


def copy(source: StrPath, target: StrPath) -> None:
    """A file; the target's folder is made."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def link_tree(source: StrPath, target: StrPath) -> None:
    """A folder whose files are those of another."""
    shutil.copytree(source, target, copy_function=os.link)


def remove(path: StrPath) -> None:
    """A file, or a folder and all in it, where it is there."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
