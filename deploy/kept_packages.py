"""Packages that a snapshot brought along: installed from /data where they are what the archive offers. Pure.

The archive is asked all the same. apt checks the signature of its index, and of each package kept here the sha256 is
compared with that index: what moved on, or was changed on the disk, is fetched as it always is.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from deploy.keep_packages import PLACE


def _find(place: str) -> str:
    """Shell that ends well where nothing is kept for this machine's distribution."""
    return f"""\
kept={place}/$(. /etc/os-release; echo "$ID-$VERSION_ID")-$(dpkg --print-architecture)
[ -d "$kept/archives" ] || exit 0
"""


def lists_command(place: str = PLACE, lists: str = "/var/lib/apt/lists") -> str:
    """Shell that gives apt the kept indexes, where it has none newer: an update then asks only what has changed.

    Of an index that has not changed apt checks the signature again and not the lists: they are held to it here.
    """
    return f"""{_find(place)}
cd "$kept/lists" || exit 0
for file in *; do
  case $file in
  *_Packages) grep -qsF "$(sha256sum < "$file" | cut -d' ' -f1)" -- *Release || continue ;;
  esac
  cp --preserve=mode,timestamps --update -- "$file" {lists}/
done"""


def archives_command(packages: Sequence[str], place: str = PLACE, archives: str = "/var/cache/apt/archives") -> str:
    """Shell that gives apt those of the kept packages that an install would fetch, byte for byte. After an update.

    apt itself takes a file of the right size in its cache for the right one, so they are compared here.
    """
    wanted = shlex.join(packages)
    ask = 'apt-get -qq -y --no-install-recommends -o Dir::Cache::archives="$none" -o Acquire::ForceHash=SHA256'
    sums = r"s/^'[^']*' \([^ ]*\.deb\) [0-9]* SHA256:\([0-9a-f]\{64\}\)$/\2  \1/p"
    return f"""{_find(place)}
none=$(mktemp -d) && mkdir "$none/partial" || exit 0
{ask} --print-uris install {wanted} | sed -n {shlex.quote(sums)} > "$none/sums"
cd "$kept/archives" && sha256sum --check "$none/sums" 2>/dev/null | sed -n 's/: OK$//p' |
  while read -r file; do cp "$file" {archives}/; done
rm -rf "$none\""""
