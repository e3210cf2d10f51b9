#!/bin/sh
# The life of a rented cluster: made, trained on, kept in a snapshot, given back, and there again the next day. `make demo`
# runs it against the cloud API of this machine; every line is what you would type for Alibaba Cloud.
set -eu

started=$(date +%s)
step() {
  printf '\n\033[1m== %s\033[0m\n   $ %s\n' "$1" "$2"
  began=$(date +%s)
  sh -c "$2"
  printf '   (%s s, %s min since the start)\n' $(( $(date +%s) - began )) $(( ($(date +%s) - started) / 60 ))
}

step "A cloud to rent from (on Alibaba Cloud it is there already)" "fab local.serve"
step "What it would cost, and four machines" "fab up --yes"
step "Bare machines -> a cluster" "pyinfra -y inventory/aliyun.py deploy/base.py"
step "Can the nodes talk, correctly and how fast?" "fab check"
step "Train a LoRA adapter, fetch and verify it" "fab train --model tiny --steps 40"
step "Keep the disk: environment, models, runs" "fab snapshots.create"
step "Give the machines back" "fab down --yes"
step "The next day: the same cluster under new addresses" "fab rebuild --yes"
step "The run goes on where it was" "fab train --resume --force --steps 60"
step "What it learned: to quote the documentation, also of modules that were kept out of its data" \
  "fab generate --prompt 'What does verify.read_header do?' --prompt 'What does lease.extend do?' --max-new-tokens 48"
step "Bring it home" "fab fetch"
step "Give everything back" "fab down --yes"
step "What is left costs this much" "fab cost"
step "The cloud goes too" "fab local.down --yes"

cat <<END

Done in $(( ($(date +%s) - started) / 60 )) min: four rented machines became a DeepSpeed cluster, a ZeRO-3 + LoRA run went over it, and the
cluster was given back and rebuilt from a snapshot in between. The adapter lies verified under runs/
(load it with peft: PeftModel.from_pretrained(base, "runs/.../adapter")).

On Alibaba Cloud: delete the line with endpoint in cluster.toml, write a name, then:   fab up
On machines of your own: list them (provider = "static"), then:   fab trust   pyinfra inventory/static.py deploy/base.py
END
