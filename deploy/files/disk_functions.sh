# `cmp` also fails on a disk it cannot read, so an unreadable disk is not blank either. The places between are
# for a disk whose start was wiped but whose files are still there.
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
# Devices are followed by major:minor, not by name: inside a container the kernel's name is another one.
number() { set -- $(stat -Lc '0x%t 0x%T' "$1"); echo "$(($1)):$(($2))"; }
partitions() { for p in /sys/dev/block/"$1"/*/partition; do [ ! -e "$p" ] || dirname "$p"; done; }
mounts() { awk -v n="$1" '$3 == n { print $5 }' /proc/self/mountinfo; }
