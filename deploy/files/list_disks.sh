# Every disk that udev gave a name by serial, and what is mounted at $mount_point.
for link in /dev/disk/by-id/*; do [ ! -b "$link" ] || echo "link=$link $(readlink -f "$link")"; done
echo "data=$(mountpoint -qd "$mount_point" 2>/dev/null)"
