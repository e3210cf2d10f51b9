"""SHA256SUMS of a folder: written where its files were made, verified wherever they arrive.

Standard library only, Python >= 3.10: nodes run this very file.

    python3 manifest.py write DIR [--exclude GLOB]...           DIR/SHA256SUMS
    python3 manifest.py verify DIR                              exit 1 and one line a problem
    python3 manifest.py seal DIR STAMP [key=value]...           write, then a stamp with hash and sizes
    python3 manifest.py check DIR STAMP                         a quick look: sizes, the manifest's hash

The format is sha256sum's, paths relative and sorted, so `sha256sum -c SHA256SUMS` works as well. Symbolic
links stand in comment lines, which sha256sum skips: `# PATH -> TARGET`.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "SHA256SUMS"
CHUNK = 1 << 18


def write(folder: Path, exclude: Iterable[str] = ()) -> str:
    """Hash every file below folder into its manifest; returns the manifest's own sha256."""
    files, links = _entries(folder, [MANIFEST, *exclude])
    lines = [f"{digest}  {path}" for path, digest in _digests(folder, files)]
    lines += [f"# {path} -> {(folder / path).readlink()}" for path in links]
    _replace(folder / MANIFEST, "".join(f"{line}\n" for line in lines))
    return file_sha256(folder / MANIFEST)


def verify(folder: Path) -> list[str]:
    """What differs from the manifest, one sentence each; files the manifest does not name are no problem."""
    try:
        digests, links = parse((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [f"{folder / MANIFEST} is missing"]
    present = [path for path in digests if (folder / path).is_file()]
    problems = [f"{path} is missing" for path in digests.keys() - present]
    problems += [f"{path} is not the file it was" for path, d in _digests(folder, present) if d != digests[path]]
    for path, target in links.items():
        link = folder / path
        if not link.is_symlink() or str(link.readlink()) != target:
            problems.append(f"{path} does not point to {target}")
    return sorted(problems)


def seal(folder: Path, stamp: str, facts: dict[str, str], exclude: Iterable[str] = ()) -> None:
    """Write the manifest, then the stamp that says the folder is complete: facts, hash, sizes."""
    digest = write(folder, [stamp, f"{stamp}.tmp", *exclude])
    named, _ = parse((folder / MANIFEST).read_text(encoding="utf-8"))
    sizes = {path: (folder / path).stat().st_size for path in named}
    content = json.dumps({**facts, "hash": digest, "sizes": sizes}, indent=1)
    _replace(folder / stamp, f"{content}\n")


def check(folder: Path, stamp: str) -> list[str]:
    """The problems seen without reading the files: half files, missing ones, a changed manifest."""
    try:
        sealed = json.loads((folder / stamp).read_text(encoding="utf-8"))
        sizes, digest = dict(sealed["sizes"]), sealed["hash"]
    except FileNotFoundError:
        return [f"{folder / stamp} is missing"]
    except (ValueError, KeyError, TypeError):
        return [f"{folder / stamp} is not a stamp of this folder"]
    problems = []
    for path, size in sizes.items():
        file = folder / path
        if not file.is_file():
            problems.append(f"{path} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{path} has {file.stat().st_size} bytes, not {size}")
    manifest = folder / MANIFEST
    if not manifest.is_file() or file_sha256(manifest) != digest:
        problems.append(f"{MANIFEST} is not the one the folder was sealed with")
    return sorted(problems)


def parse(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """A manifest's text as ({path: sha256}, {link: target})."""
    digests, links = {}, {}
    for line in text.splitlines():
        if line.startswith("# "):
            path, _, target = line[2:].partition(" -> ")
            links[path] = target
        elif line:
            digest, _, path = line.partition("  ")
            digests[path] = digest
    return digests, links


def file_sha256(path: Path) -> str:
    """sha256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digests(folder: Path, paths: list[str]) -> Iterator[tuple[str, str]]:
    # hashlib lets other threads run while it hashes a large buffer
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from zip(paths, pool.map(lambda path: file_sha256(folder / path), paths), strict=True)


def _entries(folder: Path, exclude: list[str]) -> tuple[list[str], list[str]]:
    """(files, symbolic links) below folder, relative and sorted; links are not followed."""
    files: list[str] = []
    links: list[str] = []
    for below in (folders := [""]):  # which grows
        with os.scandir(folder / below) as entries:
            for entry in entries:
                path = below + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/")
                elif not any(fnmatch.fnmatch(path, pattern) for pattern in exclude):
                    (links if entry.is_symlink() else files).append(path)
    return sorted(files), sorted(links)


def _replace(path: Path, content: str) -> None:
    """Write so that after a crash the old or the new content stands there, never half of it."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="manifest")
    parser.add_argument("action", choices=["write", "verify", "seal", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("stamp", nargs="?", default="")
    parser.add_argument("facts", nargs="*")
    parser.add_argument("--exclude", action="append", default=[], metavar="GLOB")
    options = parser.parse_args(arguments)
    if options.action == "write":
        print(write(options.folder, options.exclude))
        return 0
    if options.action == "seal":
        seal(options.folder, options.stamp, dict(fact.split("=", 1) for fact in options.facts), options.exclude)
        return 0
    problems = verify(options.folder) if options.action == "verify" else check(options.folder, options.stamp)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
