"""Rows on a cluster of four of this machine: the map of tasks, base deploys that change nothing, the first step; and
those of fixed_costs.py, slow_links.py and healing.py."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from tests.bench import fixed_costs, healing, slow_links
from tests.bench.rows import CommandFailed, Group, Measure, Row, checked, compared, paired
from tests.support.local_cluster import LocalCluster, run_id_in
from training.run.launch import launch_text, parse_launch
from training.run.launchers import launcher_files

RUNS = 3
STARTS = 5
BENCH = Path(__file__).parent


@contextmanager
def ready(folder: Path) -> Iterator[Mapping[str, Measure]]:
    """Four hosts, set up."""
    local = LocalCluster(folder, name="bench", nodes=4, subnet="10.213.81.0/24")
    local.env |= {"ANSIBLE_LOCALHOST_WARNING": "0"}
    local.env.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's commands are compiled once
    local.leave()
    try:
        local.serve()
        local.up()
        code, _, log = local.deploy()
        if code:
            raise CommandFailed(f"the base deploy ended with {code}:\n{log[-3000:]}")
        yield {
            "fab_list": partial(fab_list, local),
            "base_rerun_vs_ansible": partial(base_rerun, local, folder, mitogen=False),
            "base_rerun_vs_mitogen": partial(base_rerun, local, folder, mitogen=True),
            "first_step": partial(first_step, local),
            "resume": partial(resume, local),
            **fixed_costs.rows(local),
            **slow_links.rows(local, folder),
            **healing.rows(local),
        }
    finally:
        local.leave()


GROUP = Group(
    (
        "fab_list",
        "base_rerun_vs_ansible",
        "base_rerun_vs_mitogen",
        "first_step",
        "resume",
        *fixed_costs.NAMES,
        *slow_links.NAMES,
        *healing.NAMES,
    ),
    ready,
)


def timed(local: LocalCluster, argv: list[str], env: dict[str, str], check: Callable[[str], None]) -> float:
    """Seconds a whole command takes, interpreter start included; it must succeed and say what `check` wants."""
    began = time.monotonic()
    done = local.call(*argv, env=env)
    took = time.monotonic() - began
    check(checked(done))
    return took


def says_anything(output: str) -> None:
    if not output.strip():
        raise CommandFailed("the command printed nothing")


def pyinfra_changes_nothing(output: str) -> None:
    total = re.search(r"Grand total +(\d+) +(\S+) +(\S+) +(\d+)", output)
    if total is None or total[2] != "-" or total[3] != "-":
        raise CommandFailed(f"the base deploy changed something:\n{output[-3000:]}")


def ansible_changes_nothing(output: str) -> None:
    recap = re.findall(r"ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", output)
    if len(recap) != 4 or any(line[1:] != ("0", "0", "0") for line in recap):
        raise CommandFailed(f"the playbook is not at rest:\n{output[-3000:]}")


class Ansible:
    """The playbook over the same hosts, keys checked, pipelining on, sockets cold in every run."""

    def __init__(self, local: LocalCluster, folder: Path, mitogen: bool) -> None:
        from deploy.packages import packages_for
        from deploy.trust import SSHD_CONFIG, client_config

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


def base_rerun(local: LocalCluster, folder: Path, mitogen: bool) -> Row:
    """A base deploy that changes nothing, against ansible, with mitogen or without."""
    where = folder / f"mitogen-{mitogen}"
    where.mkdir()
    Ansible(local, where, mitogen=False)(says_anything)  # its apt module brings python3-apt along; mitogen's does not
    peer = Ansible(local, where, mitogen)
    pyinfra = ["pyinfra", "-y", local.inventory, "deploy/base.py"]
    return paired(lambda: timed(local, pyinfra, {}, pyinfra_changes_nothing), peer, RUNS)


def fab_list(local: LocalCluster) -> Row:
    """The map of tasks, against ansible's list of the playbook's tasks."""
    return paired(
        lambda: timed(local, ["fab", "--list"], {}, says_anything),
        lambda: timed(local, ["ansible-playbook", "--list-tasks", str(BENCH / "base.yml")], {}, says_anything),
        RUNS,
    )


def first_step(local: LocalCluster) -> Row:
    """From `fab train` to the first optimizer step, and its parts; the peer is DeepSpeed's launcher typed by
    hand on the head, on a copy of the same run folder, everything already in place on every node."""
    parts, pairs = [], []
    for _ in range(STARTS):
        began = time.time()
        run_id = run_id_in(checked(local.fab("train", "--model", "tiny", "--steps", "3", "--detach")))
        folder = f"/data/runs/{run_id}"
        status = _finished(local, folder)
        first = _step_after(local, folder, began)
        ranks = float(local.on("te1", f"stat -c %.W {folder}/logs/rank-0.log"))
        parts.append((status["started"] - began, ranks - status["started"], first - ranks))
        pairs.append((first - began, _by_hand(local, _copy(local, folder, began_with=()))))
    middle = [f"{statistics.median(column):.2f} s" for column in zip(*parts, strict=True)]
    names = ("check, ship and start", "launcher to ranks", "ranks to first step")
    return compared(pairs, digits=2) | {"parts": dict(zip(names, middle, strict=True))}


def resume(local: LocalCluster) -> Row:
    """From `fab train --resume` of a run that was stopped to its next step; the peer as for the first step."""
    pairs = []
    for _ in range(STARTS):
        run_id = run_id_in(checked(local.fab("train", "--model", "tiny", "--steps", "40", "--detach")))
        folder = f"/data/runs/{run_id}"
        local.on("te1", f"timeout 120 sh -c 'until [ -s {folder}/metrics.jsonl ]; do sleep 0.1; done'", timeout=130)
        checked(local.fab("stop", "--run", run_id))
        copy = _copy(local, folder, began_with=("--resume",))
        began = time.time()
        checked(local.fab("train", "--resume", run_id, "--detach"))
        _finished(local, folder)
        pairs.append((_step_after(local, folder, began) - began, _by_hand(local, copy)))
    return compared(pairs, digits=2)


def _finished(local: LocalCluster, folder: str) -> dict:
    """What a run's status.json says once it is over, waited for by one command, as the peer is. Raises CommandFailed
    where it did not finish."""
    over = f'until grep -qE \'"state": *"(finished|failed|stopped)"\' {folder}/status.json; do sleep 0.2; done'
    local.on("te1", f"timeout 300 sh -c {shlex.quote(over)}", timeout=310)
    status: dict = json.loads(local.on("te1", f"cat {folder}/status.json"))
    if status["state"] != "finished":
        raise CommandFailed(f"{folder}: {status['state']}: {status.get('reason')}")
    return status


def _step_after(local: LocalCluster, folder: str, began: float) -> float:
    """When the first optimizer step after a moment ended, both in seconds since 1970."""
    rows = map(json.loads, local.on("te1", f"cat {folder}/metrics.jsonl").splitlines())
    ends = (datetime.fromisoformat(row["time"]).timestamp() for row in rows if "loss" in row)
    return next(end for end in ends if end > began)


def _copy(local: LocalCluster, folder: str, began_with: Sequence[str]) -> str:
    """A run's folder once more on every node, for DeepSpeed's launcher and these options of the ranks' program; without
    what a run without options would go on with."""
    copy = folder.replace("tiny-", "byhand-")
    names = [node.name for node in local.cluster.nodes]
    old = "" if began_with else f"&& rm -rf {copy}/checkpoints {copy}/metrics.jsonl {copy}/logs/*"
    local.on("te1", f"pdsh -S -w {','.join(names)} 'cp -rp {folder} {copy} {old}'")
    launch = parse_launch(local.on("te1", f"cat {copy}/launch.json").replace(folder, copy))
    launch = replace(launch, launcher="deepspeed", arguments=tuple(began_with))
    for name in names:
        for file, text in {"launch.json": launch_text(launch), **launcher_files(launch)}.items():
            local.on(name, f"printf %s {shlex.quote(text)} > {copy}/{file}")
    return copy


def _by_hand(local: LocalCluster, copy: str) -> float:
    head = local.cluster.head.private_address
    command = (
        f"cd {copy} && set -a && . ./.deepspeed_env && set +a && /data/env/bin/python -m deepspeed.launcher.runner "
        f"--hostfile={copy}/hostfile --master_addr={head} --module --no_local_rank "
        f"training.node.supervision.rank_start {copy} >/dev/null 2>&1"
    )
    began = time.time()
    local.on("te1", command, timeout=240)
    return _step_after(local, copy, began) - began
