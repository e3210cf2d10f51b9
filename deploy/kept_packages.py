"""Packages that a snapshot brought along are installed from /data, and asked of the archive only where one lacks. Pure.

They lie there as a small archive of their own (deploy/keep_packages.py), whose index apt resolves in no time and whose
sums apt checks. They are trusted as the environment beside them is: who can write /data is root on every node anyway.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from deploy.keep_packages import PLACE

APT_GET = (
    "DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends"
    " -o Dpkg::Options::=--force-unsafe-io -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold"
)
UPDATE = "apt-get -q -o Acquire::Languages=none update"


def install_commands(packages: Sequence[str], refresh: str = UPDATE, place: str = PLACE) -> tuple[str, str]:
    """Shell that installs what is kept of these packages and all they need, and shell that installs from the archive
    where one of them is still missing; `refresh` is what brings its index up to date."""
    wanted = shlex.join(packages)
    missing = f"dpkg-query -W -f '${{db:Status-Status}}\\n' {wanted} 2>&1 | grep -qvx installed"
    return _from_kept(wanted, place), f"if {missing}; then {refresh} && {APT_GET} install {wanted}; fi"


def _from_kept(wanted: str, place: str) -> str:
    """Ends well whatever comes of it: nothing may be kept for this distribution, or not all that is needed."""
    return f"""\
kept={place}/$(. /etc/os-release; echo "$ID-$VERSION_ID")-$(dpkg --print-architecture)
[ -f "$kept/Packages" ] && own=$(mktemp -d) && mkdir -p "$own/lists/partial" || exit 0
echo "deb [trusted=yes] file:$kept ./" > "$own/kept.list"
alone="-o Dir::Etc::SourceList=$own/kept.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=$own/lists"
alone="$alone -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root"
{UPDATE} $alone && {APT_GET} $alone --no-remove install {wanted}
rm -rf "$own\""""
