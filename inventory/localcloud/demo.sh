#!/bin/sh
# The main job from bare hosts to a fetched adapter, on hosts booted on this machine. `make demo` runs it;
# every line is what you would type for real machines.
set -eu

step() { printf '\n\033[1m== %s\033[0m\n   $ %s\n' "$1" "$2"; sh -c "$2"; }

started=$(date +%s)
step "Boot four bare hosts" "fab local.up"
step "Bare hosts -> a cluster" "pyinfra -y inventory/local.py deploy/base.py"
step "Is everything in place?" "fab doctor"
step "Can the nodes talk, correctly and how fast?" "fab check"
step "Train a LoRA adapter, fetch and verify it" "fab train --model tiny"
step "What it learned: base and tuned, side by side" "fab generate --prompt 'What does textwrap.dedent do?'"

cat <<END

Done in $(( ($(date +%s) - started) / 60 )) min: four bare hosts became a DeepSpeed cluster, a ZeRO-3 + LoRA run went over it,
and the adapter lies verified under runs/ (load it with peft: PeftModel.from_pretrained(base, "runs/.../adapter")).

The hosts go on running; \`make demo-down\` removes them. On machines of your own: list them, and the model, in
cluster.toml (provider = "static"), then:   fab trust   pyinfra inventory/static.py deploy/base.py   fab train --model ... --data FILE
END
