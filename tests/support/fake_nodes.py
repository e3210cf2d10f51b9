"""Deploys through pyinfra over nodes that answer as told and run nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from deploy.trust import SSHD_CONFIG

REPOSITORY = Path(__file__).parents[2]
ADDRESSES = json.dumps([{"ifname": "eth1", "addr_info": [{"local": "10.0.0.1"}, {"local": "10.0.0.2"}]}])
ROUTE = json.dumps([{"dst": "10.0.0.1", "dev": "eth1"}])
LOST: dict[str, Any] = {"success": False}

# Each host answers as told; one that is to be lost fails a question once everything is prepared.
SCRIPT = """
import importlib, json, sys
from pathlib import Path
from pyinfra.api import Config, Inventory, State
from pyinfra.api.connect import connect_all
from pyinfra.api.deploy import add_deploy
from pyinfra.api.operations import run_ops
from inventory.nodes import Node
from inventory.settings import Settings

function, answers, lost, question = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
settings = Settings(**json.loads(sys.argv[5]))
nodes = [
    Node(name=name, rank=rank, address=f"203.0.113.{rank + 1}", private_address=f"10.0.0.{rank + 1}", user="root",
         port=22, key=Path("key"), known_hosts=Path("known"), gpus=0, disk_serial="bp1")
    for rank, name in enumerate(answers)
]
hosts = [
    (f"@fake/{node.name}", {"node": node, "cluster": tuple(nodes), "settings": settings, "fake_delay": 0,
                            "fake_delay_jitter": 0.01, "fake_responses": answers[node.name]})
    for node in nodes
]
state = State(Inventory((hosts, {})), Config())
named = {node.name: state.inventory.get_host(f"@fake/{node.name}") for node in nodes}
state.inventory.get_host = lambda name: named.get(name)
connect_all(state)
module, _, name = function.rpartition(".")
add_deploy(state, getattr(importlib.import_module(module), name))
prepared = {name: list(host.connector.executed_commands) for name, host in named.items()}
if lost:
    responses = named[lost].connector.data["fake_responses"]
    before = dict(responses)
    responses.clear()
    responses.update({question: {"success": False}, **{k: v for k, v in before.items() if k != question}})
error = ""
try:
    run_ops(state)
except Exception as broken:
    error = f"{type(broken).__name__}: {broken}"
print(json.dumps({
    "error": error,
    "failed": sorted(name for name, host in named.items() if host in state.failed_hosts),
    "done": {name: state.results[host].success_ops for name, host in named.items()},
    "told": {name: host.connector.executed_commands[len(prepared[name]):] for name, host in named.items()},
    "planned": {name: state.meta[host].ops for name, host in named.items()},
    "prepared": prepared,
}))
"""


def deploy(
    function: str,
    answers: dict[str, dict[str, Any]],
    lost: str = "",
    question: str = "",
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A deploy over fake nodes; `lost` fails the question that contains this text, and with it every later one."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, function, json.dumps(answers), lost, question, json.dumps(settings or {})],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


NODE = {
    "ip -j address": [ADDRESSES, ROUTE],
    "for link in /dev/disk/by-id": "link=/dev/disk/by-id/virtio-bp1 /dev/vdb\ndata=",
    "echo '[disk]'": "[disk]\nlink=/dev/disk/by-id/virtio-bp1\ndevice=/dev/vdb\nnumber=254:16\nsize=400"
    "\nblkid=2\n[fstab]",
    "cat /etc/hosts": "127.0.0.1 localhost",
    "cat /root/.ssh/authorized_keys": "ssh-ed25519 AAAAoperator me@laptop",
    "cat /etc/ssh/sshd_config.d/10-spotune.conf": SSHD_CONFIG,
    "sshd -T": "shut",
}
