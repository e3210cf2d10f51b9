# Ends $processes (PID:START each) by SIGTERM and, $patience_s later, by SIGKILL; fails if one stays. A process is known
# by number and start time, so that a later one of the same number is left alone.
alive() {
  state=$(sed 's/.*) //' "/proc/${1%:*}/stat" 2>/dev/null)
  case $state in ''|Z*) return 1 ;; esac
  [ "$(echo "$state" | cut -d' ' -f20)" = "${1#*:}" ]
}
left() { for one in $processes; do if alive "$one"; then echo "${one%:*}"; fi; done; }
wait_s() { for _ in $(seq "$1"); do [ -n "$(left)" ] || exit 0; sleep 1; done; }
for pid in $(left); do kill -TERM "$pid"; done
wait_s "$patience_s"
for pid in $(left); do kill -KILL "$pid"; done
wait_s "$patience_s"
echo "still there: $(left | tr '\n' ' ')" >&2; exit 1
