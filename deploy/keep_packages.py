"""Keep what apt has fetched on the data disk, beside the environment: a program for the head, run before a snapshot.

Standard library only. Prints one line of JSON. The next machines install from there what the archive still offers.

    python3 - < keep_packages.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

PLACE = "/data/packages"
ARCHIVES, LISTS = Path("/var/cache/apt/archives"), Path("/var/lib/apt/lists")
WANTED_LISTS = ("*InRelease", "*_Release", "*_Release.gpg", "*_Packages")
LEFT_FREE_BYTES = 2 << 30
"""Of the data disk, whatever is kept."""


def release(os_release: str) -> str:
    """As debian-12: what the packages are for."""
    rows = dict(line.partition("=")[::2] for line in os_release.splitlines())
    return "-".join(rows.get(key, "").strip("\"'") for key in ("ID", "VERSION_ID"))


def installed() -> set[tuple[str, str, str]]:
    """(name, version, architecture) of every package that is installed."""
    shape = "${Package} ${Version} ${Architecture} ${db:Status-Status}\n"
    told = subprocess.run(["dpkg-query", "-W", "-f", shape], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in told.splitlines())
    return {(row[0], row[1], row[2]) for row in rows if len(row) == 4 and row[3] == "installed"}


def is_of(file: Path, packages: set[tuple[str, str, str]]) -> bool:
    """Whether an archive, named as apt names it (name_version_arch.deb), is of one of the packages."""
    parts = tuple(unquote(part) for part in file.stem.split("_"))
    return parts in packages


def keep(place: Path, archives: Path, lists: Path, packages: set[tuple[str, str, str]]) -> dict[str, int]:
    """Bring `place` up to date: the archives of what is installed, the lists they were found in, nothing else."""
    kept, kept_lists = place / "archives", place / "lists"
    files = [file for file in archives.glob("*.deb") if is_of(file, packages)]
    new = [file for file in files if not _same(file, kept / file.name)]
    indexes = [file for pattern in WANTED_LISTS for file in lists.glob(pattern)]
    size = sum(file.stat().st_size for file in [*new, *indexes])
    place.parent.mkdir(parents=True, exist_ok=True)
    if not indexes or shutil.disk_usage(place.parent).free < size + LEFT_FREE_BYTES:
        return {"packages": 0, "bytes": 0}
    kept.mkdir(parents=True, exist_ok=True)
    for file in new:
        shutil.copy2(file, kept)
    for file in kept.iterdir():
        if not is_of(file, packages):
            file.unlink()
    half = place / "lists.half"
    for old in (half, kept_lists):
        shutil.rmtree(old, ignore_errors=True)
    half.mkdir()
    for file in indexes:
        shutil.copy2(file, half)
    half.rename(kept_lists)
    there = list(kept.iterdir())
    return {"packages": len(there), "bytes": sum(file.stat().st_size for file in there)}


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.stat().st_size == other.stat().st_size


def main(place: Path) -> None:
    if not shutil.which("dpkg-query") or not place.parent.is_mount():
        print(json.dumps({"packages": 0, "bytes": 0}))
        return
    of = release(Path("/etc/os-release").read_text(encoding="utf-8"))
    arch = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
    print(json.dumps(keep(place / f"{of}-{arch}", ARCHIVES, LISTS, installed())))


if __name__ == "__main__":
    main(Path(PLACE))
