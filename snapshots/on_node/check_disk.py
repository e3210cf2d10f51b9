"""Is a restored disk what its snapshot's tags say? A program for the node that has it. Standard library only.

    unshare --mount python3 -c THIS '{"serial": "...", "filesystem": "ext4", "manifest": SOURCE, "folders": [...]}'

Mounts the disk read-only where only this program sees it, and compares every folder with its own SHA256SUMS, by
deploy/on_node/manifest.py, whose source comes with the question. A line of JSON for each folder, and one a second
meanwhile.
The journal is replayed, as any machine that gets such a disk does: the disk is there for nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

APPEARS_S = 60
OPTIONS = {"xfs": "ro,nouuid"}
"""A copy of a mounted XFS has its UUID, which XFS refuses unless told."""


def end_with_input() -> None:
    """Leave at once when whoever asked has gone."""

    def listen() -> None:
        while os.read(0, 4096):  # unbuffered: a lock held by a thread at the end would abort the interpreter
            pass
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


def tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def tell_time() -> None:
    began = time.monotonic()
    while True:
        time.sleep(1)
        tell(seconds=round(time.monotonic() - began))


def device_of(serial: str) -> Path:
    """The block device with the file system: the disk, or its only partition. udev may take a moment."""
    end = time.monotonic() + APPEARS_S
    while True:
        links = sorted(Path("/dev/disk/by-id").glob(f"*{serial[:20]}*"))
        parts = [link for link in links if re.search(r"-part\d+$", link.name)]
        if links and time.monotonic() > end - APPEARS_S + 1:  # partitions come after their disk
            return (parts or links)[0].resolve()
        if time.monotonic() > end:
            sys.exit(f"no disk with serial {serial} appeared within {APPEARS_S} s")
        time.sleep(0.2)


def mounted(device: Path, filesystem: str) -> Path:
    """Where the disk is mounted, for this program alone."""
    place = Path(tempfile.mkdtemp(prefix="spotune-check-"))
    command = ["mount", "-o", OPTIONS.get(filesystem, "ro"), str(device), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        place.rmdir()
        sys.exit(f"{device} cannot be mounted: {done.stderr.strip()}")
    return place


def problems_of(folder: Path, wanted: str, manifest: Any) -> list[str]:
    """What is wrong with a folder, one sentence each. `wanted`: the first digits of its manifest's sha256."""
    if not folder.is_dir():
        return [f"{folder.name} is not there"]
    found: list[str] = manifest["verify"](folder)
    sums = folder / manifest["MANIFEST"]
    if wanted and sums.is_file() and not hashlib.sha256(sums.read_bytes()).hexdigest().startswith(wanted):
        found.append(f"{sums.name} is not the one the snapshot was made with")
    return found


def check(root: Path, folders: list[dict[str, str]], manifest: Any) -> None:
    """Tell about each folder: {"label", "path" below the disk, "manifest": wanted}."""
    for folder in folders:
        began = time.monotonic()
        problems = problems_of(root / folder["path"], folder["manifest"], manifest)
        tell(label=folder["label"], problems=problems[:20], count=len(problems), took_s=time.monotonic() - began)


def main(question: dict[str, Any]) -> None:
    end_with_input()
    manifest: dict[str, Any] = {"__name__": "manifest"}
    exec(question["manifest"], manifest)
    threading.Thread(target=tell_time, daemon=True).start()
    if "root" in question:
        check(Path(question["root"]), question["folders"], manifest)
        return
    place = mounted(device_of(question["serial"]), question["filesystem"])
    try:
        check(place, question["folders"], manifest)
    finally:
        subprocess.run(["umount", str(place)], check=False)
        place.rmdir()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
