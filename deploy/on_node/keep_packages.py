"""Keep what apt has fetched on the data disk, beside the environment: a program for the head, run before a snapshot.

Standard library only, Python 3.10 or newer. Prints one line of JSON. What is kept is an archive in apt's own flat form
(packages and their index), from which the next machines install.

    python3 -c THIS
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

PLACE = "/data/packages"
ARCHIVES = Path("/var/cache/apt/archives")
LEFT_FREE_BYTES = 2 << 30
"""Of the data disk, whatever is kept."""


def release(os_release: str) -> str:
    """As debian-12: what the packages are for."""
    rows = dict(line.partition("=")[::2] for line in os_release.splitlines())
    return "-".join(rows.get(key, "").strip("\"'") for key in ("ID", "VERSION_ID"))


def installed() -> set[tuple[str, str, str]]:
    """(name, version, architecture) of every package that is installed."""
    shape = "${Package} ${Version} ${Architecture} ${db:Status-Status}\n"
    output = subprocess.run(["dpkg-query", "-W", "-f", shape], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in output.splitlines())
    return {(row[0], row[1], row[2]) for row in rows if len(row) == 4 and row[3] == "installed"}


def is_of(file: Path, packages: set[tuple[str, str, str]]) -> bool:
    """Whether an archive, named as apt names it (name_version_arch.deb), is of one of the packages."""
    parts = tuple(unquote(part) for part in file.stem.split("_"))
    return parts in packages


def keep(place: Path, archives: Path, packages: set[tuple[str, str, str]]) -> dict[str, int]:
    """Bring `place` up to date: the archives of what is installed, nothing else, and their index."""
    destination = place / "archives"
    files = [file for file in archives.glob("*.deb") if is_of(file, packages)]
    new = [file for file in files if not _same(file, destination / file.name)]
    place.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(place.parent).free < sum(file.stat().st_size for file in new) + LEFT_FREE_BYTES:
        return {"packages": 0, "bytes": 0}
    destination.mkdir(parents=True, exist_ok=True)
    for file in new:
        shutil.copy2(file, destination)
    entries = {file: _entry(file) for file in sorted(destination.iterdir()) if is_of(file, packages)}
    whole = [file for file, entry in entries.items() if entry]
    for file in set(destination.iterdir()) - set(whole):
        file.unlink()
    half = place / "Packages.half"
    half.write_text("\n".join(entries[file] for file in whole), encoding="utf-8")
    half.rename(place / "Packages")
    return {"packages": len(whole), "bytes": sum(file.stat().st_size for file in whole)}


def _entry(file: Path) -> str:
    """What apt's index says of a package; empty for a file that is none, as one that was cut short."""
    result = subprocess.run(["dpkg-deb", "--field", str(file)], capture_output=True, text=True, check=False)
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    if result.returncode:
        return ""
    return (
        f"{result.stdout}Filename: ./archives/{file.name}\nSize: {file.stat().st_size}\nSHA256: {digest.hexdigest()}\n"
    )


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.stat().st_size == other.stat().st_size


def main(place: Path) -> None:
    if not shutil.which("dpkg-query") or not place.parent.is_mount():
        print(json.dumps({"packages": 0, "bytes": 0}))
        return
    of = release(Path("/etc/os-release").read_text(encoding="utf-8"))
    arch = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
    print(json.dumps(keep(place / f"{of}-{arch}", ARCHIVES, installed())))


if __name__ == "__main__":
    main(Path(PLACE))
