"""`fab keep` as a service of the user's own systemd, on a machine that stays on: no terminal has to stay open."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inventory.notify_services import VARIABLE
from inventory.renting.keeper import service_name
from inventory.renting.tags import StateFiles
from inventory.settings import PATH_VARIABLE, settings_path
from snapshots.listing import SnapshotError
from training.text.files import object_in
from training.text.internet import CA_VARIABLES

CARRIED = ("HOME", "PATH", "USER", "LANG", "LC_ALL", "TZ", "XDG_STATE_HOME", "XDG_CONFIG_HOME")
PROXIES = tuple(name for each in ("http", "https", "all", "no") for name in (f"{each}_proxy", f"{each}_PROXY".upper()))
"""Of the terminal's environment what the service has too. Keys of a cloud and addresses of notifications are not: they
come from their files."""
TRY_S = 120.0


class ServiceError(SnapshotError):
    """`fab keep` cannot be a service of this machine; the message says why."""


@dataclass(frozen=True)
class KeeperService:
    """Of one run."""

    cluster: str
    run_id: str
    nodes: int
    """How many machines the run may have."""
    orders: int
    list_price: bool
    checkout: Path
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return service_name(self.cluster)

    @property
    def command(self) -> list[str]:
        flags = ["--run", self.run_id, "--nodes", str(self.nodes), "--replacements", str(self.orders)]
        flags += ["--list-price"] if self.list_price else []
        return [fab_program(), "keep.service", *flags]

    @property
    def unit(self) -> str:
        """The unit file. It begins again after it was killed and after a restart of the machine. Its own end, once the
        run is over or it has given up, disables it."""
        disable = f'[ "$$EXIT_CODE" != exited ] || systemctl --user disable {self.name}'
        lines = [
            "[Unit]",
            f"Description=spotune keeps the machines of {self.run_id}",
            "StartLimitIntervalSec=0",
            "[Service]",
            "Type=exec",
            f"WorkingDirectory={_escaped(str(self.checkout))}",
            *(f"Environment={_quoted(f'{name}={value}')}" for name, value in self.environment.items()),
            f"ExecStart={' '.join(_quoted(word.replace('$', '$$')) for word in self.command)}",
            f"ExecStopPost=/bin/sh -c {_quoted(disable)}",
            "Restart=on-abnormal",
            "RestartSec=15",
            "[Install]",
            "WantedBy=default.target",
        ]
        return "\n".join(lines) + "\n"


def service_of(cluster: str, run_id: str, nodes: int, orders: int, *, list_price: bool) -> KeeperService:
    """As this terminal would do it."""
    environment = {name: os.environ[name] for name in (*CARRIED, *PROXIES, *CA_VARIABLES) if os.environ.get(name)}
    environment |= {PATH_VARIABLE: str(settings_path().resolve()), "PYTHONUNBUFFERED": "1"}  # the journal is read live
    return KeeperService(cluster, run_id, nodes, orders, list_price, Path.cwd(), environment)


def orders_left(cluster: str, run_id: str, orders: int) -> int:
    """Of the machines that a service may order, those that it has not yet, however often it began."""
    noted = object_in(_orders_file(cluster)).get(run_id)
    return min(orders, noted) if isinstance(noted, int) else orders


def note_orders(cluster: str, run_id: str, left: int) -> None:
    _orders_file(cluster).write_text(json.dumps({run_id: left}), encoding="utf-8")


def _orders_file(cluster: str) -> Path:
    return StateFiles.of(cluster).folder / "keep-orders.json"


def fab_program() -> str:
    """The `fab` beside this Python."""
    return str(Path(sys.executable).with_name("fab"))


def try_environment(service: KeeperService, argv: Sequence[str]) -> None:
    """Whether the cloud and the head answer without what is in this terminal's environment alone, such as a cloud's
    keys and an ssh agent. Raises ServiceError."""
    if os.environ.get(VARIABLE):
        raise ServiceError(f"a service does not have {VARIABLE}: put the addresses into the file of [notify]")
    try:
        done = subprocess.run(
            [fab_program(), *argv],
            cwd=service.checkout,
            env={**service.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRY_S,
            check=False,
        )
        failed, said = done.returncode != 0, done.stderr
    except subprocess.TimeoutExpired:
        failed, said = True, f"no answer within {TRY_S:.0f} s"
    if failed:
        why = (said.strip().splitlines() or ["it does not say why"])[-1]
        raise ServiceError(
            f"a service does not have all of this terminal's environment, and without it fab {' '.join(argv)} fails: "
            f"{why}; keys of a cloud can be in its own file, and an ssh key for a service has no passphrase"
        )


def install(service: KeeperService, say: Callable[[str], None]) -> None:
    """Write the unit and start it. Raises ServiceError."""
    _systemctl("daemon-reload")  # whether there is one, before anything is written
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / f".{service.name}"
    with open(half, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(service.unit)
    half.replace(folder / service.name)
    note_orders(service.cluster, service.run_id, service.orders)
    try:
        _systemctl("daemon-reload")
        _systemctl("enable", "--now", str(folder / service.name))
    except ServiceError:
        (folder / service.name).unlink()
        raise
    say(f"{service.name} keeps the machines of {service.run_id}; what it does: journalctl --user -fu {service.name}")
    say(f"to end it: systemctl --user disable --now {service.name}")
    if not _lingers():
        say("it would end when you log out; with `loginctl enable-linger` it does not")


def _systemctl(*argv: str) -> None:
    program = shutil.which("systemctl")
    if not program:
        raise ServiceError("this machine has no systemd; run fab keep without --install, in tmux for instance")
    done = subprocess.run([program, "--user", *argv], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServiceError(
            f"systemctl --user {argv[0]}: {done.stderr.strip() or done.returncode}; without --install fab keep needs "
            "no systemd"
        )


def _lingers() -> bool:
    argv = ["loginctl", "show-user", str(os.getuid()), "--property=Linger", "--value"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip() == "yes"
    except OSError:
        return False


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """One word of a unit file."""
    inner = re.sub(r'(["\\])', r"\\\1", _escaped(text))
    return f'"{inner}"'
