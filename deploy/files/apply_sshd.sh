# Puts $file.new in the place of $file and has sshd take it up, or leaves all as it was and exits with $refused.
# The .new goes last: while it is there, the running sshd may have older settings than its files.
set -e
new=$file.new; old=$file.before
undo() {
  if [ -e "$old" ]; then mv "$old" "$file"; else rm -f "$file"; fi
  echo "$1; the old settings are back" >&2; exit "$refused"
}
if [ -e "$file" ]; then cp -p "$file" "$old"; else rm -f "$old"; fi
cp -p "$new" "$file"
sshd -t || undo 'sshd refuses the new settings'
open=$(open_logins)
[ -z "$open" ] || undo "sshd still says '$(echo $open)' with $file in place (the first line of \
/etc/ssh/sshd_config must be: Include /etc/ssh/sshd_config.d/*.conf)"
systemctl try-reload-or-restart ssh || undo 'sshd could not be reloaded'
rm -f "$old" "$new"
