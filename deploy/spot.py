"""The watcher for the cloud's notice that it takes a machine back: on rented nodes, and on no others."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.facts.server import Command

from deploy.managed import file_text, managed, put_text
from deploy.node_files import text_of
from deploy.node_operation import Commands, node_operation
from deploy.on_node.probe import SPOT_WATCH as UNIT
from inventory.settings import Settings

SCRIPT_PATH = managed("/opt/spotune/spot_watch.py")
UNIT_PATH = managed(f"/etc/systemd/system/{UNIT}")
STATE = f"systemctl is-active {UNIT}; systemctl is-enabled {UNIT} 2>/dev/null; true"
SCRIPT = Path(__file__).parent / "on_node" / "spot_watch.py"


def notice_address(settings: Settings) -> str:
    """Where the nodes ask whether they are being reclaimed; empty where there is no such place."""
    if not settings.is_rented:
        return ""
    return settings.local.metadata_address if settings.rental.is_local else settings.rental.notice_address


def unit_text(address: str, node: str, head: str, script: str) -> str:
    """The unit. The script's hash stands in it, so that another script is another unit."""
    argv = ["/usr/bin/python3", SCRIPT_PATH, "--address", address, "--node", node, "--head", head]
    script_hash = hashlib.sha256(script.encode()).hexdigest()[:16]
    return text_of("spot_watch.service", command=shlex.join(argv), script_hash=script_hash)


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
    same = (file_text(SCRIPT_PATH), file_text(UNIT_PATH)) == (script, unit)
    if same and host.get_fact(Command, STATE) == "active\nenabled":
        host.noop("the watcher runs")
        return
    yield f"systemctl stop {UNIT} 2>/dev/null; install -d -m 755 /opt/spotune"
    yield from put_text(SCRIPT_PATH, script)
    yield from put_text(UNIT_PATH, unit)
    yield f"systemctl daemon-reload && systemctl enable --quiet {UNIT} && systemctl restart {UNIT}"


@node_operation
def remove_watcher() -> Commands:
    """Neither unit nor script is there."""
    if file_text(UNIT_PATH) is None and file_text(SCRIPT_PATH) is None:
        host.noop("there is no watcher")
        return
    yield f"systemctl disable --quiet --now {UNIT} 2>/dev/null; rm -f {UNIT_PATH} {SCRIPT_PATH}"
    yield "systemctl daemon-reload"
