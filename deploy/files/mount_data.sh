# Mounts $mount_point by its fstab line; exits with $refused where it holds files, or another than $device came up there.
set -eu
mkdir -p "$mount_point"
if [ -n "$(ls -A "$mount_point")" ]; then
  echo "$mount_point already holds files on the system disk; move them away, the disk would hide them" >&2
  exit "$refused"
fi
mount "$mount_point"
[ "$(mountpoint -qd "$mount_point")" = "$(mountpoint -qx "$device")" ] || {
  echo "$mount_point came up from $(findmnt -no SOURCE "$mount_point"), not from $device" >&2
  exit "$refused"
}
