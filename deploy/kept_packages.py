"""Packages that a snapshot brought along are installed from /data, and asked of the archive only where one lacks. Pure.

They lie there as a small archive of their own (on_node/keep_packages.py), whose index apt resolves in no time and whose
sums apt checks. They are trusted as the environment beside them is: who can write /data is root on every node anyway.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from deploy.node_files import shell
from deploy.on_node.keep_packages import PLACE

APT_GET = (
    "DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends"
    " -o Dpkg::Options::=--force-unsafe-io -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold"
)
APT_UPDATE = "apt-get -q -o Acquire::Languages=none update"
LISTS_LOCK = "/var/lib/apt/lists/lock"
_WAIT = f"import fcntl; fcntl.lockf(open('{LISTS_LOCK}', 'a'), fcntl.LOCK_EX)"
UPDATE = f"timeout 600 python3 -c {shlex.quote(_WAIT)}; {APT_UPDATE}"
"""`apt-get update` does not wait for the lock of its lists, whatever DPkg::Lock::Timeout says: a first boot has it."""


def install_commands(packages: Sequence[str], refresh: str = UPDATE, place: str = PLACE) -> tuple[str, str]:
    """Shell that installs what is kept of these packages and all they need, and shell that installs from the archive
    where one of them is still missing; `refresh` is what brings its index up to date."""
    wanted = shlex.join(packages)
    missing = f"dpkg-query -W -f '${{db:Status-Status}}\\n' {wanted} 2>&1 | grep -qvx installed"
    kept = shell("install_kept.sh", place=place, packages=" ".join(packages), update=APT_UPDATE, apt_get=APT_GET)
    return kept, f"if {missing}; then {{ {refresh}; }} && {APT_GET} install {wanted}; fi"
