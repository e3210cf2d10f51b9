# Exits with $refused while a run is active on this node: it has files below $path open. The head has the run's unit, the
# other nodes have only its processes, known by $variable in their environment.
units() {  # a run's unit ends with the time it was made; spotune has other units too
  systemctl list-units 'spotune-*.service' --state=active,activating --plain --no-legend 2>/dev/null |
    sed -n 's/^spotune-\(.*-[0-9]\{8\}-[0-9]\{6\}\)\.service .*/\1/p'
}
processes() { grep -hsoz "^$variable=.*" "$proc"/[0-9]*/environ | tr '\0' '\n' | sed 's#.*/##'; }
runs=$({ units; processes; } | sort -u | xargs)
[ -z "$runs" ] || { echo "$path is used by $runs: end that with \`fab stop\`, then deploy again" >&2; exit "$refused"; }
