"""What is on a node's disks: the shell that looks, and what it printed, as values. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MOUNT_POINT = "/data"

# `cmp` also fails on a disk it cannot read, so an unreadable disk is not blank either. The places between are
# for a disk whose start was wiped but whose files are still there.
NONZERO = """
nonzero() {  # device, size in bytes: says where something other than zeros stands; nothing on a blank disk
  cmp -s -n 4194304 "$1" /dev/zero || { echo 'in its first 4 MiB'; return; }
  cmp -s -n 1048576 -i "$(($2 - 1048576)):0" "$1" /dev/zero || { echo 'in its last 1 MiB'; return; }
  place=1
  while [ "$place" -lt 64 ]; do
    at=$(($2 / 64 * place))
    cmp -s -n 65536 -i "$at:0" "$1" /dev/zero || { echo "$((at / 1048576)) MiB into it"; return; }
    place=$((place + 1))
  done
}
"""

# Devices are followed by major:minor, not by name: inside a container the kernel's name is another one.
SYSFS = """
number() { set -- $(stat -Lc '0x%t 0x%T' "$1"); echo "$(($1)):$(($2))"; }
partitions() { for p in /sys/dev/block/"$1"/*/partition; do [ ! -e "$p" ] || dirname "$p"; done; }
mounts() { awk -v n="$1" '$3 == n { print $5 }' /proc/self/mountinfo; }
"""

LIST_DISKS = f"""
for link in /dev/disk/by-id/*; do [ ! -b "$link" ] || echo "link=$link $(readlink -f "$link")"; done
echo "data=$(mountpoint -qd {MOUNT_POINT} 2>/dev/null)"
"""


def inspect_command(link: str) -> str:
    """Shell that prints what `parse_disk` reads. It changes nothing."""
    return (
        f"disk={shlex.quote(link)}\n{NONZERO}{SYSFS}"
        + """
describe() {  # device, major:minor
  echo "device=$1"; echo "number=$2"; echo "size=$(blockdev --getsize64 "$1")"
  blkid -p -o export "$1" 2>/dev/null; echo "blkid=$?"
  mounts "$2" | sed 's/^/mount=/'
  for h in /sys/dev/block/"$2"/holders/*; do [ ! -e "$h" ] || echo "holder=${h##*/}"; done
  case $(blkid -p -s TYPE -o value "$1" 2>/dev/null) in
  ext4)
    dumpe2fs -h "$1" 2>/dev/null |
      awk '/^Block count:/ {n=$3} /^Block size:/ {printf "filesystem=%.0f\\n", n*$3}' ;;
  xfs)
    here=$(mounts "$2" | head -n 1)
    xfs_info "${here:-$1}" 2>/dev/null |
      sed -n 's/^data .*bsize=\\([0-9]*\\) *blocks=\\([0-9]*\\),.*/\\1 \\2/p' |
      awk '{printf "filesystem=%.0f\\n", $1*$2}' ;;
  esac
}
real=$(readlink -f "$disk"); n=$(number "$real")
echo '[disk]'; echo "link=$disk"; describe "$real" "$n"
blkid -p "$real" >/dev/null 2>&1 || echo "nonzero=$(nonzero "$real" "$(blockdev --getsize64 "$real")")"
for folder in $(partitions "$n"); do
  read -r pn < "$folder/dev"; read -r index < "$folder/partition"; read -r start < "$folder/start"
  echo '[partition]'; echo "index=$index"; echo "start=$((start * 512))"; echo "link=$disk-part$index"
  for node in "$disk-part$index" "$real$index" "${real}p$index" "/dev/${folder##*/}"; do
    [ -b "$node" ] && [ "$(number "$node")" = "$pn" ] || continue
    describe "$(readlink -f "$node")" "$pn"; break
  done
  [ -b "$disk-part$index" ] && echo "linked=yes"
done
echo '[fstab]'; cat /etc/fstab 2>/dev/null
true"""
    )


@dataclass(frozen=True)
class Volume:
    """A disk or one of its partitions."""

    link: str
    """Its name under /dev/disk/by-id/."""
    device: str
    number: str
    """major:minor"""
    size_bytes: int
    kind: str = ""
    """What `blkid -p` calls its content (ext4, LVM2_member, ...); empty where it finds nothing."""
    table: str = ""
    """gpt or dos, where there is a partition table."""
    uuid: str = ""
    probed: bool = True
    """False where blkid found contradicting signatures."""
    nonzero: str = ""
    mounts: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    """Device mapper, raid or LVM devices made of it right now."""
    filesystem_bytes: int = 0
    start_bytes: int = 0
    index: int = 0
    linked: bool = True
    """Whether udev made the by-id link."""


@dataclass(frozen=True)
class DiskFacts:
    """One disk with its partitions, and the node's fstab."""

    disk: Volume
    partitions: tuple[Volume, ...] = ()
    fstab: str = ""


@dataclass(frozen=True)
class Disks:
    """The node's disks by their links under /dev/disk/by-id/, and what is mounted at /data."""

    links: Mapping[str, str] = field(default_factory=dict)
    data_number: str = ""
    """major:minor of what is mounted at /data; empty where nothing is."""


def parse_disks(lines: Iterable[str]) -> Disks:
    """What LIST_DISKS printed."""
    links: dict[str, str] = {}
    data_number = ""
    for line in lines:
        key, _, value = line.partition("=")
        if key == "link":
            link, device = value.rsplit(" ", 1)
            links[link] = device
        elif key == "data":
            data_number = value
    return Disks(links, data_number)


def parse_disk(lines: Iterable[str]) -> DiskFacts:
    """What `inspect_command` printed."""
    sections: list[tuple[str, list[str]]] = []
    for line in lines:
        in_fstab = bool(sections) and sections[-1][0] == "fstab"
        if not in_fstab and (heading := re.fullmatch(r"\[(\w+)\]", line)):
            sections.append((heading[1], []))
        elif sections:
            sections[-1][1].append(line)
    disk = next(_volume(body) for name, body in sections if name == "disk")
    fstab = next(body for name, body in sections if name == "fstab")
    return DiskFacts(
        disk=disk,
        partitions=tuple(_volume(body) for name, body in sections if name == "partition"),
        fstab="".join(f"{line}\n" for line in fstab),
    )


def _volume(lines: list[str]) -> Volume:
    pairs = [(key, value) for key, _, value in (line.partition("=") for line in lines)]
    one = dict(pairs)
    return Volume(
        link=one["link"],
        device=one.get("device", ""),
        number=one.get("number", ""),
        size_bytes=int(one.get("size") or 0),
        kind=one.get("TYPE", ""),
        table=one.get("PTTYPE", ""),
        uuid=one.get("UUID", ""),
        probed=one.get("blkid") in ("0", "2"),
        nonzero=one.get("nonzero", ""),
        mounts=tuple(value for key, value in pairs if key == "mount"),
        holders=tuple(value for key, value in pairs if key == "holder"),
        filesystem_bytes=int(one.get("filesystem", 0)),
        start_bytes=int(one.get("start", 0)),
        index=int(one.get("index", 0)),
        linked=one.get("linked") == "yes" or "index" not in one,
    )
