"""What NVIDIA's driver told the kernel of a GPU: the `NVRM: Xid` lines of dmesg. Standard library only.

    python -m training.node.diagnosis.xid --since EPOCH

prints those from then on, one a line. They outlive the process they concern, and where a GPU fell off the bus they are
the only ones that know.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MOST = 3
WIDTH = 200
HARDWARE = frozenset({48, 62, 64, 74, 79, 94, 95, 110, 119, 120, 140, 143})
"""Numbers that mean the card, its memory or its link: no program brings them about, and no smaller batch mends them
(docs.nvidia.com/deploy/xid-errors). The rest tell what the driver did to a program that failed or was killed, or of
memory that it mended by itself (63: a row remapped; 92: many single-bit errors, corrected)."""
_LINE = re.compile(r"^\[ *(?P<uptime_s>\d+\.\d+)\] (?P<text>NVRM: Xid .*)$", re.MULTILINE)
_NUMBER = re.compile(r"Xid \([^)]*\): (\d+)")


def xid_lines(dmesg: str, booted: float, since: float) -> list[str]:
    """The last lines about a GPU since then; `booted` and `since` in seconds since the epoch."""
    lines = [match["text"] for match in _LINE.finditer(dmesg) if booted + float(match["uptime_s"]) >= since]
    return ["".join(c if c.isprintable() else "?" for c in text)[:WIDTH] for text in lines[-MOST:]]


@dataclass(frozen=True)
class Xid:
    """One line of the driver's."""

    text: str
    number: int | None = None

    @property
    def of_hardware(self) -> bool:
        """Whether it says that the card itself failed."""
        return self.number in HARDWARE


def parse_xid(line: str) -> Xid:
    """What a line says."""
    match = _NUMBER.search(line)
    return Xid(line, int(match[1]) if match else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", type=float, default=0.0)
    since = parser.parse_args().since
    done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        print(done.stderr.strip() or "dmesg says nothing", file=sys.stderr)
        return 1
    booted = time.time() - float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    for line in xid_lines(done.stdout, booted, since):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
