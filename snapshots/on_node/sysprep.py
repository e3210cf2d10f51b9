"""What must not get into an image, off a machine's system disk for a moment, and back: a program for the node.

Standard library only. It lies in memory with all it takes away, and a timer puts everything back after a minute, so
that a laptop that dies between the two leaves nothing missing.

    python3 /run/spotune-image/sysprep.py strip | restore | used

Taken away are keys (the host's, the cluster's, whatever lies in a home), who may log in, the machine's and the
cloud's names for it, logs, dumps and what is temporary. Files that may hold a secret are overwritten before they go,
as an image has the blocks of deleted files too.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

STORE = Path("run/spotune-image")
KEPT = "kept.tar"
WAS_STRIPPED = "was stripped"
UNIT = "spotune-image-back"
BACK_AFTER_S = 60
MOST_BYTES = 512 << 20
"""Of all that is taken away: it lies in memory."""
SECRET = (
    "etc/ssh/ssh_host_*", "root/**/*", "home/**/*", "tmp/**/*", "var/tmp/**/*",
    "var/lib/systemd/coredump/*", "var/crash/**/*", "var/lib/systemd/random-seed", "var/lib/cloud/**/*",
)  # fmt: skip
"""Overwritten, then removed."""
OWN = (
    "etc/ssh/ssh_known_hosts", "etc/spotune/**/*", "etc/hostname", "var/log/**/*", "var/lib/dhcp/*", "var/spool/**/*",
    "etc/systemd/system/spotune-spot-watch.service", "etc/systemd/system/*/spotune-spot-watch.service",
    "var/lib/dbus/machine-id",
)  # fmt: skip
"""Removed: the next machine makes its own."""
EMPTIED = ("etc/machine-id",)
"""Empty means to systemd that the machine shall make one."""
HOST_KEYS_UNIT = """\
# made by spotune: a machine that comes up without host keys makes its own
[Unit]
Description=Make ssh host keys where there are none
ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key
Before=ssh.service sshd.service

[Service]
Type=oneshot
ExecStart=/usr/bin/ssh-keygen -A

[Install]
WantedBy=multi-user.target
"""
HOST_KEYS_FILE = Path("etc/systemd/system/spotune-host-keys.service")


def found(root: Path, patterns: Iterable[str]) -> list[Path]:
    """Files and links the patterns fit, on this very disk: what is mounted below is none of it."""
    device = root.lstat().st_dev
    seen = {path for pattern in patterns for path in root.glob(pattern)}
    return sorted(p for p in seen if (p.is_symlink() or p.is_file()) and p.lstat().st_dev == device)


def without_data(fstab: str) -> str:
    """The table without the line for /data: the next machine's disk has another serial."""
    lines = fstab.splitlines(keepends=True)
    return "".join(line for line in lines if line.lstrip().startswith("#") or not re.match(r"\s*\S+\s+/data\s", line))


@contextmanager
def alone(store: Path) -> Iterator[None]:
    """The timer waits for whoever is still taking things away, however long that takes."""
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def strip(root: Path, store: Path) -> None:
    """Pack everything, then take it away. Raises OSError before anything is gone."""
    with alone(store):
        _take_away(root, store)


def _take_away(root: Path, store: Path) -> None:
    secret, own = found(root, SECRET), found(root, OWN)
    emptied, fstab = found(root, EMPTIED), found(root, ("etc/fstab",))
    everything = [*secret, *own, *emptied, *fstab]
    size = sum(path.lstat().st_size for path in everything)
    if size > min(MOST_BYTES, shutil.disk_usage(store).free // 2):
        raise OSError(
            f"{size / 2**20:.0f} MiB lie in homes, logs and temporary folders of the system disk: too much to lay "
            "aside; move to /data what is large there (du -xsh /root /home /tmp /var/log)"
        )
    half = store / f"{KEPT}.half"
    with tarfile.open(half, "w") as pack:
        for path in everything:
            pack.add(path, arcname=str(path.relative_to(root)), recursive=False)
    half.rename(store / KEPT)
    for path in secret:
        overwrite(path)
    for path in [*secret, *own]:
        path.unlink(missing_ok=True)
    for path in emptied:
        path.write_bytes(b"")
    for path in fstab:
        path.write_text(without_data(path.read_text(encoding="utf-8")), encoding="utf-8")
    os.sync()


def overwrite(path: Path) -> None:
    """Zeros in place of what a file holds, on the disk when this returns."""
    if path.is_symlink():
        return
    with path.open("r+b") as file:
        left = path.stat().st_size
        while left > 0:
            left -= file.write(bytes(min(left, 1 << 20)))
        file.flush()
        os.fsync(file.fileno())


def restore(root: Path, store: Path) -> bool:
    """Everything where it was; False where there is nothing to put back. Cut off, it can be repeated."""
    with alone(store):
        if not (store / KEPT).exists():
            return False
        with tarfile.open(store / KEPT) as pack:
            pack.extraction_filter = lambda member, path: member  # owners and modes as they were: it is our own
            for member in pack:
                (root / member.name).unlink(missing_ok=True)
                pack.extract(member, root)
        os.sync()
        (store / KEPT).unlink()
        return True


def strip_running(root: Path, store: Path) -> None:
    """As a command, on a machine that runs."""
    if len(Path("/proc/swaps").read_text(encoding="utf-8").splitlines()) > 1:
        raise OSError("this machine swaps to a disk, where keys may lie: swapoff -a, and take it out of /etc/fstab")
    if not (root / HOST_KEYS_FILE).exists():
        (root / HOST_KEYS_FILE).write_text(HOST_KEYS_UNIT, encoding="utf-8")
        subprocess.run(["systemctl", "enable", "--quiet", HOST_KEYS_FILE.name], check=True)
    timer = ["systemd-run", "--quiet", "--collect", f"--unit={UNIT}", f"--on-active={BACK_AFTER_S}"]
    program = [sys.executable, str(store / "sysprep.py"), "restore"]
    subprocess.run([*timer, "--timer-property=AccuracySec=1s", *program], check=True)
    strip(root, store)
    subprocess.run(["fstrim", "/"], check=False, capture_output=True)  # blocks of files deleted long ago


def restore_running(root: Path, store: Path) -> None:
    """As a command; says whether there was something to put back."""
    if restore(root, store):
        print(WAS_STRIPPED, flush=True)
        subprocess.run(["journalctl", "--rotate"], check=False, capture_output=True)  # its files are others now
    if not os.environ.get("INVOCATION_ID"):  # asked by the laptop, not by the timer
        subprocess.run(["systemctl", "stop", f"{UNIT}.timer"], check=False, capture_output=True)


def main(what: str) -> None:
    root = Path("/")
    store = root / STORE
    if what == "used":
        print(shutil.disk_usage(root).used)
        return
    try:
        {"strip": strip_running, "restore": restore_running}[what](root, store)
    except (OSError, tarfile.TarError, subprocess.CalledProcessError) as error:
        sys.exit(f"{type(error).__name__ if not str(error) else error}")


if __name__ == "__main__":
    main(sys.argv[1])
