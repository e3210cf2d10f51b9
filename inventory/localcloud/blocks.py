"""Copies of disks: blocks at one moment, holes left out."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from inventory.localcloud.commands import LocalCloudError

# A file system that is mounted and not frozen yet is held still meanwhile; one that the machine froze itself stays
# frozen. One program does all of it in a session of its own, so that nothing stays frozen whoever dies.
COPY = """\
set -u
source=$1 half=$2 target=$3 device=$4
shift 4
frozen=
for mounted in "$@"; do
    if fsfreeze --freeze "$mounted" 2>/dev/null; then frozen="$frozen $mounted"; fi
done
code=0
{ [ -z "$device" ] || sync --data "$device"; } && cp --sparse=always --reflink=auto "$source" "$half" || code=$?
for mounted in $frozen; do fsfreeze --unfreeze "$mounted"; done
[ $code = 0 ] && mv "$half" "$target" || { rm -f "$half"; exit 1; }
"""


def copy(source: Path, target: Path, device: str = "", mounted: Sequence[Path] = ()) -> int:
    """Copy a disk in one piece; the bytes the copy takes.

    `device`: its loop device, written out first. `mounted`: where file systems on it are mounted, as paths without
    spaces that reach them from here.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_suffix(".half")
    done = subprocess.run(
        ["sh", "-c", COPY, "copy", source, half, target, f"/dev/{device}" if device else "", *mounted],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    if done.returncode != 0:
        raise LocalCloudError(f"{source.name} cannot be copied: {' '.join(done.stderr.split()) or 'no reason given'}")
    return target.stat().st_blocks * 512
