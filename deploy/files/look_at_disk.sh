# What is on $disk (a link by serial) and its partitions, and the node's fstab. Changes nothing.
describe() {  # device, major:minor
  echo "device=$1"; echo "number=$2"; echo "size=$(blockdev --getsize64 "$1")"
  blkid -p -o export "$1" 2>/dev/null; echo "blkid=$?"
  mounts "$2" | sed 's/^/mount=/'
  for h in /sys/dev/block/"$2"/holders/*; do [ ! -e "$h" ] || echo "holder=${h##*/}"; done
  case $(blkid -p -s TYPE -o value "$1" 2>/dev/null) in
  ext4)
    dumpe2fs -h "$1" 2>/dev/null |
      awk '/^Block count:/ {n=$3} /^Block size:/ {printf "filesystem=%.0f\n", n*$3}' ;;
  xfs)
    here=$(mounts "$2" | head -n 1)
    xfs_info "${here:-$1}" 2>/dev/null |
      sed -n 's/^data .*bsize=\([0-9]*\) *blocks=\([0-9]*\),.*/\1 \2/p' |
      awk '{printf "filesystem=%.0f\n", $1*$2}' ;;
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
true
