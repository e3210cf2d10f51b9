"""Benchmarks against what one would use instead, paired in one run: `make bench`.

Boots a cluster of four on this machine, sets it up, measures, writes bench.json: a list of
{name, ours, peer, ratio, unit, runs}. ours and peer are medians in `unit`, ratio the median of peer / ours pair by
pair: above 1 we are ahead. The hosts and their controller share this machine, so only ratios mean anything.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from tests.bench import rebuild, training
from tests.local_cluster import ROOT, LocalCluster, wait_for

RUNS = 5
BENCH = Path(__file__).parent


def paired(name: str, ours: Callable[[], float], peer: Callable[[], float], runs: int = RUNS) -> dict:
    """Ours and the peer in turn, each once to warm up and `runs` times to count; both return seconds."""
    ours(), peer()
    pairs = [(ours(), peer()) for _ in range(runs)]
    return {
        "name": name,
        "ours": round(statistics.median(a for a, _ in pairs), 3),
        "peer": round(statistics.median(b for _, b in pairs), 3),
        "ratio": round(statistics.median(b / a for a, b in pairs), 2),
        "unit": "s",
        "runs": runs,
    }


def timed(local: LocalCluster, argv: list[str], env: dict[str, str], check: Callable[[str], None]) -> float:
    """Seconds a whole command takes, interpreter start included; it must succeed and say what `check` wants."""
    began = time.monotonic()
    done = local.call(*argv, env=env)
    took = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    check(done.stdout)
    return took


def says_anything(output: str) -> None:
    if not output.strip():
        raise SystemExit("the command printed nothing")


def pyinfra_changes_nothing(output: str) -> None:
    total = re.search(r"Grand total +(\d+) +(\S+) +(\S+) +(\d+)", output)
    if total is None or total[2] != "-" or total[3] != "-":
        raise SystemExit(f"the base deploy changed something:\n{output[-3000:]}")


def ansible_changes_nothing(output: str) -> None:
    recap = re.findall(r"ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", output)
    if len(recap) != 4 or any(line[1:] != ("0", "0", "0") for line in recap):
        raise SystemExit(f"the playbook is not at rest:\n{output[-3000:]}")


class Ansible:
    """The playbook over the same hosts, keys checked, pipelining on, sockets cold in every run."""

    def __init__(self, local: LocalCluster, folder: Path, mitogen: bool) -> None:
        from deploy.packages import packages_for
        from deploy.trust_files import SSHD_CONFIG, client_config

        nodes = local.cluster.nodes
        self.local = local
        self.folder = folder
        self.inventory = folder / "hosts.ini"
        self.inventory.write_text(
            "[nodes]\n"
            + "".join(
                f"{n.name} ansible_host={n.address} ansible_user={n.user} ansible_ssh_private_key_file={n.key} "
                "ansible_python_interpreter=/usr/bin/python3\n"
                for n in nodes
            )
        )
        self.variables = folder / "variables.json"
        stamp = json.loads(local.on("te1", "cat /data/env/spotune-env.json"))
        self.variables.write_text(
            json.dumps(
                {
                    "packages": packages_for(local.cluster.settings),
                    "nodes": [{"name": n.name, "private_address": n.private_address} for n in nodes],
                    "client_config": client_config([n.name for n in nodes], [n.private_address for n in nodes]),
                    "sshd_config": SSHD_CONFIG,
                    "env_hash": stamp["hash"],
                }
            )
        )
        self.env = {
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_FORKS": "8",
            "ANSIBLE_HOST_KEY_CHECKING": "1",
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        }
        if mitogen:
            import ansible_mitogen

            plugins = Path(ansible_mitogen.__file__).parent / "plugins" / "strategy"
            self.env |= {"ANSIBLE_STRATEGY_PLUGINS": str(plugins), "ANSIBLE_STRATEGY": "mitogen_linear"}

    def __call__(self, check: Callable[[str], None] = ansible_changes_nothing) -> float:
        known = self.local.cluster.head.known_hosts
        with tempfile.TemporaryDirectory(prefix="sptb", dir="/tmp") as sockets:
            args = f"-o ControlMaster=auto -o ControlPersist=60s -o ControlPath={sockets}/%C"
            env = self.env | {"ANSIBLE_SSH_ARGS": f"{args} -o UserKnownHostsFile={known}"}
            playbook = [
                "ansible-playbook",
                "-i",
                str(self.inventory),
                "-e",
                f"@{self.variables}",
                str(BENCH / "base.yml"),
            ]
            return timed(self.local, playbook, env, check)


def base_reruns(local: LocalCluster, folder: Path) -> list[dict]:
    """A base deploy that changes nothing, against ansible, and against ansible with mitogen."""

    def ours() -> float:
        return timed(local, ["pyinfra", "-y", "inventory/local.py", "deploy/base.py"], {}, pyinfra_changes_nothing)

    results = []
    for name, mitogen in (("base_rerun_vs_ansible", False), ("base_rerun_vs_mitogen", True)):
        where = folder / name
        where.mkdir()
        peer = Ansible(local, where, mitogen)
        peer(says_anything)  # ansible's apt module brings python3-apt along
        results.append(paired(name, ours, peer))
    return results


def fab_list(local: LocalCluster) -> dict:
    """The map of tasks, against ansible's list of the playbook's tasks."""
    return paired(
        "fab_list",
        lambda: timed(local, ["fab", "--list"], {}, says_anything),
        lambda: timed(local, ["ansible-playbook", "--list-tasks", str(BENCH / "base.yml")], {}, says_anything),
    )


def first_steps(local: LocalCluster) -> list[dict]:
    """From `fab train` to the first optimizer step, and its parts; the peer is DeepSpeed's launcher typed by
    hand on the head, on a copy of the same run folder, everything already in place on every node."""
    parts, totals, peers = [], [], []
    for _ in range(3):
        began = time.time()
        started = local.fab("train", "--model", "tiny", "--steps", "3", "--detach")
        run_id = re.search(r"tiny-\d{8}-\d{6}", started.stdout)[0]
        folder = f"/data/runs/{run_id}"
        first = wait_for("the first step", lambda folder=folder: _first_step(local, folder), 180)
        wait_for("the end", lambda f=folder: '"finished"' in local.on("te1", f"cat {f}/status.json"), 120)
        status = json.loads(local.on("te1", f"cat {folder}/status.json"))
        ranks = float(
            local.on(
                "te1", f"stat -c %Y.%N {folder}/logs/rank-0.log 2>/dev/null; stat -c %W {folder}/logs/rank-0.log"
            ).split()[-1]
        )
        parts.append((status["started"] - began, ranks - status["started"], first - ranks))
        totals.append(first - began)
        peers.append(_by_hand(local, folder))
        time.sleep(1)  # run ids count seconds
    middle = [f"{statistics.median(column):.2f} s" for column in zip(*parts, strict=True)]
    row = {
        "name": "first_step",
        "ours": round(statistics.median(totals), 2),
        "peer": round(statistics.median(peers), 2),
        "ratio": round(statistics.median(p / t for t, p in zip(totals, peers, strict=True)), 2),
        "unit": "s",
        "runs": len(totals),
        "parts": dict(zip(("check, ship and start", "launcher to ranks", "ranks to first step"), middle, strict=True)),
    }
    return [row]


def _first_step(local: LocalCluster, folder: str) -> float | None:
    line = local.on("te1", f"head -n 1 {folder}/metrics.jsonl 2>/dev/null; true")
    return (
        datetime.fromisoformat(json.loads(line)["time"]).timestamp() if line.endswith("\n") and line.strip() else None
    )


def _by_hand(local: LocalCluster, folder: str) -> float:
    copy = f"{folder.replace('tiny-', 'byhand-')}"
    names = ",".join(node.name for node in local.cluster.nodes)
    local.on(
        "te1",
        f"pdsh -S -w {names} 'cp -r {folder} {copy} && rm -rf {copy}/checkpoints {copy}/metrics.jsonl {copy}/logs/* "
        f"&& sed -i s,{folder},{copy},g {copy}/launch.json {copy}/.deepspeed_env'",
    )
    head = local.cluster.head.private_address
    command = (
        f"cd {copy} && set -a && . ./.deepspeed_env && set +a && /data/env/bin/python -m deepspeed.launcher.runner "
        f"--hostfile={copy}/hostfile --master_addr={head} --module --no_local_rank "
        f"training.supervision.rank_start training.finetune --run {copy} >/dev/null 2>&1"
    )
    began = time.time()
    local.on("te1", command, timeout=240)
    first = _first_step(local, copy)
    assert first is not None
    return first - began


def main() -> None:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        local = LocalCluster(folder, name="bench", subnet="10.213.81.0/24")
        local.env |= {"ANSIBLE_LOCALHOST_WARNING": "0", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        local.fab("local.down")
        try:
            up = local.fab("local.up")
            if up.returncode:
                raise SystemExit(up.stdout)
            code, _, log = local.deploy()
            if code:
                raise SystemExit(log[-3000:])
            results = [fab_list(local), *base_reruns(local, Path(folder)), *first_steps(local)]
        finally:
            local.fab("local.down")
    with tempfile.TemporaryDirectory() as folder:
        results.append(rebuild.row(Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        results += training.rows(Path(folder))
    (ROOT / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    show(results)


def show(results: list[dict]) -> None:
    """The table a person reads."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="ratio > 1: we are ahead")
    for column in ("name", "ours", "peer", "ratio", "unit", "runs"):
        table.add_column(column)
    for row in results:
        table.add_row(*(str(row[column]) for column in ("name", "ours", "peer", "ratio", "unit", "runs")))
    console = Console()
    console.print(table)
    for row in results:
        for part, value in row.get("parts", {}).items():
            console.print(f"  {row['name']}: {part}: {value}")
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    console.print(f"at {revision.stdout.strip() or 'no revision'}; written to bench.json")


if __name__ == "__main__":
    main()
