# Makes a $filesystem of this $label on $disk while it is still blank; on any other it exits with $refused.
# The test stands directly before mkfs: between the plan and this command the disk may have changed.
# mkfs gets no force option: ext4's and xfs's own checks refuse a disk in use.
set -eu
refuse() { echo "$disk is not blank: $1; it was not touched" >&2; exit "$refused"; }
n=$(number "$disk"); rc=0; blkid -p "$disk" >/dev/null 2>&1 || rc=$?
[ "$rc" -eq 2 ] || refuse "blkid finds something on it"
where=$(nonzero "$disk" "$(blockdev --getsize64 "$disk")"); [ -z "$where" ] || refuse "there are bytes $where"
[ -z "$(partitions "$n")" ] || refuse "it has partitions"
[ -z "$(mounts "$n")" ] || refuse "it is mounted"
"mkfs.$filesystem" -q -L "$label" "$disk"
