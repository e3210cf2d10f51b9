# NVIDIA's devices, straight from sysfs: minimal images have no lspci. HGX boards from B200 on show their NVSwitches as
# InfiniBand bridges of Mellanox, whose VPD says SW_MNG: by it NVIDIA's fabric manager finds them too.
list_pci() {
  for d in /sys/bus/pci/devices/*; do
    [ -e "$d/vendor" ] || continue
    read -r vendor < "$d/vendor"
    case $vendor in 0x10de) ;; 0x15b3) grep -qs SW_MNG "$d/vpd" || continue ;; *) continue ;; esac
    read -r class < "$d/class"; read -r device < "$d/device"; echo "$vendor $class $device"
  done
}
