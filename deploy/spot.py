"""The watcher for the cloud's notice that it takes a machine back: on rented nodes, and on no others."""

from __future__ import annotations

import hashlib
import shlex
from io import StringIO
from pathlib import Path

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.api.facts import FactBase
from pyinfra.facts.files import FileContents
from pyinfra.operations import files

from deploy.node_operation import Commands, node_operation
from deploy.probe import SPOT_WATCH as UNIT
from inventory.settings import Settings

"""Alibaba Cloud's, the same on every machine."""
SCRIPT_PATH = "/opt/spotune/spot_watch.py"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
SCRIPT = Path(__file__).with_name("spot_watch.py")


class UnitState(FactBase[list[str]]):
    """A systemd unit's state, and whether it starts with the machine: two words, as ["active", "enabled"]."""

    def command(self, unit: str) -> str:
        return f"systemctl is-active {unit}; systemctl is-enabled {unit} 2>/dev/null; true"

    def process(self, output: list[str]) -> list[str]:
        return [line.strip() for line in output if line.strip()]

    @staticmethod
    def default() -> list[str]:
        return []


def notice_address(settings: Settings) -> str:
    """Where the nodes ask whether they are being taken back; empty where there is no such place."""
    if not settings.is_rented:
        return ""
    return settings.local.metadata_address if settings.rental.is_local else settings.rental.notice_address


def unit_text(address: str, node: str, head: str, script: str) -> str:
    """The unit. It may write to /run/spotune alone, which keeps its notices when the watcher is started again.

    The script's hash stands in it, so that another script is another unit.
    """
    argv = ["/usr/bin/python3", SCRIPT_PATH, "--address", address, "--node", node, "--head", head]
    return f"""\
# made by spotune's base deploy; script {hashlib.sha256(script.encode()).hexdigest()[:16]}
[Unit]
Description=Watch for the cloud's notice that it takes this machine back
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={shlex.join(argv)}
Restart=always
RestartSec=5
RuntimeDirectory=spotune/reclaim
RuntimeDirectoryPreserve=yes
MemoryMax=64M
TasksMax=16
CPUWeight=20
OOMScoreAdjust=-500
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""


@deploy("Spot notice")
def watch_for_notices() -> None:
    """Rented nodes watch for the cloud's notice and tell the head; elsewhere nothing of it is left."""
    settings, node = host.data.settings, host.data.node
    if address := notice_address(settings):
        script = SCRIPT.read_text(encoding="utf-8")
        unit = unit_text(address, node.name, host.data.cluster[0].name, script)
        run_watcher(name="Watcher for the cloud's notice", script=script, unit=unit)
    else:
        remove_watcher(name="No watcher: these machines are not rented")


@node_operation
def run_watcher(script: str, unit: str) -> Commands:
    """The watcher runs as it is given here. It is stopped first: a deploy cut off half-way leaves it for the next."""
    same = (_text(SCRIPT_PATH), _text(UNIT_PATH)) == (script, unit)
    if same and host.get_fact(UnitState, unit=UNIT) == ["active", "enabled"]:
        host.noop("the watcher runs")
        return
    yield f"systemctl stop {UNIT} 2>/dev/null; install -d -m 755 /opt/spotune"
    yield from files.put._inner(src=StringIO(script), dest=SCRIPT_PATH, mode="644")
    yield from files.put._inner(src=StringIO(unit), dest=UNIT_PATH, mode="644")
    yield f"systemctl daemon-reload && systemctl enable --quiet {UNIT} && systemctl restart {UNIT}"


@node_operation
def remove_watcher() -> Commands:
    """Neither unit nor script is there."""
    if _text(UNIT_PATH) is None and _text(SCRIPT_PATH) is None:
        host.noop("there is no watcher")
        return
    yield f"systemctl disable --quiet --now {UNIT} 2>/dev/null; rm -f {UNIT_PATH} {SCRIPT_PATH}"
    yield "systemctl daemon-reload"


def _text(path: str) -> str | None:
    lines = host.get_fact(FileContents, path=path)
    return None if lines is None else "\n".join([*lines, ""])
