# GPUs and driver. $packages: all that a plan may name, with KERNEL for the kernel's release. Changes nothing.
kernel=$(uname -r)
echo '[pci]'; list_pci
echo '[system]'; echo "kernel=$kernel"
sed -n 's/^ID=/distribution=/p; s/^VERSION_ID=/release=/p' /etc/os-release | tr -d '"'
[ ! -d /sys/module/nouveau ] || echo nouveau=yes
[ ! -e "$blacklist" ] || echo blacklisted=yes
echo "module=$(modinfo -F version nvidia 2>/dev/null)"
uninstaller=/usr/bin/nvidia-uninstall  # left by NVIDIA's .run installer
if [ -e $uninstaller ] && ! dpkg -S $uninstaller >/dev/null 2>&1; then echo run_file=yes; fi
for f in /sys/firmware/efi/efivars/SecureBoot-*; do
  [ ! -e "$f" ] || echo "secure_boot=$(od -An -tu1 -j4 -N1 "$f" | tr -d ' ')"
done
for p in /proc/[0-9]*; do
  ls -l "$p/fd" 2>/dev/null | grep -q ' /dev/nvidia[0-9]' && echo "gpu_user=${p#/proc/} $(cat "$p/comm")"
done
for unit in nvidia-persistenced nvidia-fabricmanager; do
  [ -n "$(systemctl list-unit-files "$unit.service" --no-legend 2>/dev/null)" ] || continue
  echo "unit=$unit $(systemctl is-active "$unit" 2>/dev/null) $(systemctl is-enabled "$unit" 2>/dev/null)"
done
echo '[loaded]'; cat /proc/driver/nvidia/version 2>/dev/null
echo '[sources]'
grep -rhsE '^(deb|URIs:)' /etc/apt/sources.list /etc/apt/sources.list.d
echo '[installed]'
dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\n' '*nvidia*' 'cuda-*' nvlsm 2>/dev/null
echo '[held]'; apt-mark showhold
echo '[available]'
apt-cache madison $(echo "$packages" | sed "s/KERNEL/$kernel/g") 2>/dev/null
true
