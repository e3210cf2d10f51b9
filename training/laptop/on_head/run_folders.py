"""Runs of a head: how they go, what is in their folders, and starting one."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import TypedDict

from training.laptop.on_head.fs import MOST, StrPath, names, read, sha256, small, text

STATUS, METRICS, LAUNCH, RECIPE, STARTS = "status.json", "metrics.jsonl", "launch.json", "recipe.toml", "starts.jsonl"
PREPARING, CLAIM, STOP, CHECKPOINTS, BEST, SUMS = "preparing", "claim", "stop", "checkpoints", "best", "SHA256SUMS"
UNIT = "spotune-"
SUPERVISES = "-m training.node.supervision.supervise --run "
"""In the command line of a run's supervisor, before the run's folder."""
VALIDATION = b'"validation_loss"'
LINES, LAST_LINES = 20, 5
"""Of metrics.jsonl: in a look, and in a look at all runs; the last one may be half written."""
LOCK_WAIT_S = 1.0
"""A look at the lock holds it for a moment."""


class LookAnswer(TypedDict):
    run: str
    status: str
    """Empty where there is none."""
    alive: bool
    now: float
    """By the head's clock."""
    metrics: str
    """The last lines."""
    evaluation: str
    """The newest line with a validation loss; empty where there is none."""


class DetailAnswer(TypedDict):
    run: str
    kib: int
    claim: str
    checkpoints: dict[str, float]
    """What is in that folder, and when it was written."""
    best: str
    first_start: str
    """Its line."""
    loadable: bool
    """Whether its adapter or model is linked where a user looks for it."""
    base_model: str
    """The recipe's line."""
    cluster: str


class CheckpointAnswer(TypedDict):
    whole: int | None
    """The step of the newest whose checksums hold."""
    damaged: list[int]
    """Steps of those after it, the newest first."""


def look(folder: StrPath, here: bool) -> LookAnswer:
    """One look at a run. `here`: its supervisor is a process of this machine, else a unit of systemd."""
    return _looks([Path(folder)], here, LINES)[0]


def looks(runs: StrPath, here: bool) -> list[LookAnswer]:
    """A look at each folder with a launch.json."""
    return _looks([folder for folder in _folders(runs) if (folder / LAUNCH).is_file()], here, LAST_LINES)


def _folders(runs: StrPath) -> list[Path]:
    return [folder for name in names(runs) if (folder := Path(runs, name)).is_dir()]


def _looks(folders: list[Path], here: bool, lines: int) -> list[LookAnswer]:
    statuses = {folder: small(folder / STATUS) for folder in folders}
    alive = {folder for folder in folders if _supervised(folder, statuses[folder])} if here else _active(folders)
    return [_look(folder, status, folder in alive, lines) for folder, status in statuses.items()]


def _look(folder: Path, status: str, alive: bool, lines: int) -> LookAnswer:
    metrics = read(folder / METRICS, last=MOST) or b""
    lines += metrics.endswith(b"\n")
    return {
        "run": folder.name,
        "status": status,
        "alive": alive,
        "now": time.time(),
        "metrics": b"\n".join(metrics.rsplit(b"\n", lines)[-lines:]).decode("utf-8", "replace"),
        "evaluation": _newest_evaluation(metrics).decode("utf-8", "replace"),
    }


def _newest_evaluation(metrics: bytes) -> bytes:
    """The last whole line with a validation loss."""
    at = metrics.rfind(VALIDATION)
    while at >= 0:
        begin, end = metrics.rfind(b"\n", 0, at) + 1, metrics.find(b"\n", at) + 1
        if metrics[begin:end].endswith(b"}\n"):
            return metrics[begin:end]
        at = metrics.rfind(VALIDATION, 0, begin)
    return b""


def _supervised(folder: Path, status: str) -> bool:
    """Whether the process that wrote the status runs; its pid may be another program's by now."""
    found = re.search(r'"supervisor_pid": *([0-9]+)', status)
    try:
        words = Path(f"/proc/{found[1] if found else 0}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return False
    return os.fsencode(f"{SUPERVISES}{folder}") in words


def _active(folders: list[Path]) -> set[Path]:
    """Those whose unit runs. Asked to stop it is deactivating, until the ranks have saved."""
    argv = ["systemctl", "is-active", *(UNIT + folder.name for folder in folders)]
    try:
        states = subprocess.run(argv, stdout=subprocess.PIPE, check=False).stdout.decode().split() if folders else []
    except OSError:
        return set()
    return {folders[at] for at, state in enumerate(states) if state in {"active", "deactivating"}}


def details(runs: StrPath) -> list[DetailAnswer]:
    """Of each run's folder, what a list of runs says."""
    return [_detail(folder) for folder in _folders(runs)]


def _detail(folder: Path) -> DetailAnswer:
    argv = ["du", "-sk", str(folder)]
    used = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.split()
    base = re.search(r"^base_model = .*", small(folder / RECIPE), re.MULTILINE)
    cluster = re.search(r'"cluster": *"([a-z0-9-]*)"', small(folder / LAUNCH))
    checkpoints = folder / CHECKPOINTS
    return {
        "run": folder.name,
        "kib": int(used[0]) if used else 0,
        "claim": small(folder / CLAIM),
        "checkpoints": {name: (checkpoints / name).lstat().st_mtime for name in names(checkpoints)},
        "best": small(checkpoints / BEST),
        "first_start": small(folder / STARTS).partition("\n")[0],
        "loadable": (folder / "adapter").exists() or (folder / "model").exists(),
        "base_model": base[0] if base else "",
        "cluster": cluster[1] if cluster else "",
    }


def checkpoints_of_all(runs: StrPath) -> dict[str, list[str]]:
    """What is in the folders of checkpoints, by run."""
    return {folder.name: names(folder / CHECKPOINTS) for folder in _folders(runs)}


def whole_checkpoint(folder: StrPath, needed: list[str], either: list[list[str]]) -> CheckpointAnswer:
    """By their checksums; each lists all that is `needed`, and all of one list of `either`."""
    steps = [int(found[1]) for name in names(folder) if (found := re.fullmatch(r"step-([0-9]+)", name))]
    damaged: list[int] = []
    for step in sorted(steps, reverse=True):
        if _is_whole(Path(folder, f"step-{step}"), needed, either):
            return {"whole": step, "damaged": damaged}
        damaged.append(step)
    return {"whole": None, "damaged": damaged}


def _is_whole(folder: Path, needed: list[str], either: list[list[str]]) -> bool:
    lines = [line.partition("  ") for line in (text(folder / SUMS) or "").splitlines()]
    sums = {name: digest for digest, _, name in lines}
    listed = sums.keys() >= {*needed} and any(sums.keys() >= {*each} for each in either)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    try:
        return listed and found - {SUMS} == sums.keys() and all(sha256(folder / name) == sums[name] for name in sums)
    except OSError:
        return False


# Starts


def starting(runs: StrPath) -> list[str] | None:
    """The runs that are being prepared while somebody holds the lock of starts; None where nobody does."""
    if not Path(runs).is_dir():
        return None
    lock, until = os.open(runs, os.O_RDONLY), time.monotonic() + LOCK_WAIT_S
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return None
    finally:
        os.close(lock)
    return [folder.name for folder in _folders(runs) if (folder / PREPARING).exists()]


def reserve(runs: StrPath, run_ids: list[str], token: str) -> str:
    """Make the folder of the first id that nobody has: it is whoever's has the token. Empty where all are taken."""
    for run_id in run_ids:
        folder = Path(runs, run_id)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        (folder / PREPARING).write_text(f"{token}\n", encoding="utf-8")
        return run_id
    return ""


def discard(folder: StrPath, token: str) -> None:
    """Remove a run that was reserved with this token and is not ready yet."""
    if small(Path(folder, PREPARING)).strip() == token:
        shutil.rmtree(folder)


def remove_abandoned(runs: StrPath) -> None:
    """Remove what starts that broke off have left; for who holds the lock of starts."""
    for folder in _folders(runs):
        if (folder / PREPARING).is_file() and not (folder / STATUS).exists():
            shutil.rmtree(folder)


def make_runs(runs: StrPath) -> bool:
    """Make the folder of runs; False where no disk is mounted above it."""
    if subprocess.run(["mountpoint", "-q", str(Path(runs).parent)], check=False).returncode:
        return False
    Path(runs).mkdir(exist_ok=True)
    own_runs(runs)
    return True


def own_runs(runs: StrPath) -> None:
    """Runs are read by root and whoever logs in, who fetches over sftp without sudo, and by nobody else of a shared
    machine; so are prepared data. Files inside need no modes of their own."""
    runs = Path(runs)
    if runs.is_dir():
        os.chown(runs, int(os.environ.get("SUDO_UID") or 0), -1)
        runs.chmod(0o700)
        if (cache := runs.parent / "cache").is_dir():
            cache.chmod(0o700)


def unpack(archive: StrPath, folder: StrPath) -> None:
    """A tar that was sent, into a run's folder."""
    Path(folder, "logs").mkdir(parents=True, exist_ok=True)
    _run("tar", "-C", str(folder), "--no-same-owner", "-xzf", str(archive))


def start(folder: StrPath, argv: list[str], wait_s: float) -> bool:
    """Start a run's supervisor; whether it has written a status within that time. The old one stays until then: a run
    without one is not found."""
    Path(folder, STOP).unlink(missing_ok=True)
    before, until = _which(Path(folder, STATUS)), time.monotonic() + wait_s
    _run(*argv)
    while _which(Path(folder, STATUS)) == before:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _which(path: Path) -> tuple[int, int]:
    """What tells a file from the one that was put in its place: the number alone is given to the next one."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return 0, 0
    return about.st_ino, about.st_mtime_ns


def _run(*argv: str) -> None:
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        raise OSError(f"{argv[0]} ended with {done.returncode}: {done.stderr.decode('utf-8', 'replace').strip()}")
