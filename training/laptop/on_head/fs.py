"""Files and folders of a head, and programs it runs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Union

StrPath = Union[str, "os.PathLike[str]"]
SMALL, MOST = 1 << 18, 48 << 20
"""Bytes that are read of a small file, and of any."""
BLOCK = 1 << 20


# What is asked. OSError where it cannot be done.


def text(path: StrPath, last_bytes: int = 0) -> str | None:
    """What a file holds, or its end alone; None where there is no regular file."""
    content = read(path, last_bytes=last_bytes)
    return None if content is None else content.decode("utf-8", "replace")


def names(folder: StrPath) -> list[str]:
    """What is in a folder, sorted; nothing where there is none."""
    try:
        return sorted(path.name for path in Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def newest_texts(folder: StrPath, pattern: str, most: int) -> list[str]:
    """What the newest files below a folder hold that match, the newest first."""
    found = {path: about for path in Path(folder).glob(pattern) if (about := look_at(path))}
    files = [path for path, about in found.items() if stat.S_ISREG(about.st_mode)]
    return [small(path) for path in sorted(files, key=lambda path: found[path].st_mtime, reverse=True)[:most]]


def matches(path: StrPath, pattern: str) -> list[str]:
    """Each place of a log's end that matches, in their order."""
    return [found[0] for found in re.finditer(pattern, text(path, MOST) or "")]


def exists(path: StrPath) -> bool:
    return look_at(path) is not None


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
    """A file or a link, or a folder and all in it, where it is there."""
    path = Path(path)
    if is_directory(path) and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


VERBS = (text, names, newest_texts, matches, exists, executable, sha256, write, rename, copy, link_tree, remove)


# What the answers are made with


def read(path: StrPath, *, first_bytes: int = 0, last_bytes: int = 0) -> bytes | None:
    """What a file holds, or its beginning or end alone; None where there is no regular file. Raises OSError where all
    of it is more than MOST."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # of a pipe an open would wait for its writer
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return None
        if last_bytes:
            file.seek(max(0, about.st_size - last_bytes))
        elif not first_bytes and about.st_size > MOST:
            raise OSError(f"{os.fspath(path)} has {about.st_size} bytes, more than {MOST}")
        return file.read(first_bytes or MOST)


def small(path: StrPath) -> str:
    """What a small file holds, cut where it is none; nothing where it cannot be read."""
    try:
        return (read(path, first_bytes=SMALL) or b"").decode("utf-8", "replace")
    except OSError:
        return ""


def look_at(path: StrPath) -> os.stat_result | None:
    """What is known of the file that a path leads to; None where that is nothing."""
    try:
        return Path(path).stat()
    except OSError:
        return None


def is_file(path: StrPath) -> bool:
    return bool((about := look_at(path)) and stat.S_ISREG(about.st_mode))


def is_directory(path: StrPath) -> bool:
    return bool((about := look_at(path)) and stat.S_ISDIR(about.st_mode))


def run(*argv: str, input_text: str = "", timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it said. OSError where it cannot be started, or has not ended in time."""
    try:
        return subprocess.run(
            argv, input=input_text, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{argv[0]} has not ended within {timeout_s:.0f} s") from None


def run_well(*argv: str) -> None:
    """The same; OSError with its first words where it fails."""
    done = run(*argv)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise OSError(f"{argv[0]} ended with {done.returncode}: {reason[:300]}")
