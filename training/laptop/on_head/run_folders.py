"""Runs of a head: how they go, what is in their folders, and starting one."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import TypedDict

from training.laptop.on_head.fs import (
    MOST,
    StrPath,
    exists,
    is_directory,
    is_file,
    look_at,
    names,
    read,
    remove,
    run,
    run_well,
    sha256,
    small,
)

STATUS, METRICS, LAUNCH, RECIPE, STARTS = "status.json", "metrics.jsonl", "launch.json", "recipe.toml", "starts.jsonl"
LOGS, PACKED = "logs", "logs/packed.tar.gz"
PREPARING, CLAIM, GO, STOP = "preparing", "claim", "go", "stop"
CHECKPOINTS, BEST, SUMS = "checkpoints", "best", "SHA256SUMS"
RUN_ID = r"[a-z0-9][a-z0-9._-]*-[0-9]{8}-[0-9]{6}"
UNIT = "spotune-"
SUPERVISES = "-m training.node.supervision.supervise --run "
"""In the command line of a run's supervisor, before the run's folder."""
VALIDATION = b'"validation_loss"'
LINES, LAST_LINES, LINES_BYTES = 20, 5, 1 << 16
"""Of metrics.jsonl: in a look, and in a look at all runs; the last one may be half written."""
LOCK_WAIT_S = 1.0
"""So long a look waits for a lock that may be about to be given back."""


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
    """A look at each run with a launch.json."""
    return _looks([folder for folder in _folders(runs) if is_file(folder / LAUNCH)], here, LAST_LINES)


def _folders(runs: StrPath) -> list[Path]:
    paths = [Path(runs, name) for name in names(runs) if re.fullmatch(RUN_ID, name)]
    return [path for path in paths if is_directory(path)]


def _looks(folders: list[Path], here: bool, lines: int) -> list[LookAnswer]:
    statuses = {folder: small(folder / STATUS) for folder in folders}
    begun = [folder for folder in folders if not exists(folder / PREPARING)]
    alive = {folder for folder in begun if _supervised(folder, statuses[folder])} if here else _active(begun)
    return [_look(folder, status, folder in alive, lines) for folder, status in statuses.items()]


def _look(folder: Path, status: str, alive: bool, lines: int) -> LookAnswer:
    try:
        metrics = read(folder / METRICS, last_bytes=MOST) or b""
    except OSError:
        metrics = b""
    last = metrics[-LINES_BYTES:]
    lines += last.endswith(b"\n")
    return {
        "run": folder.name,
        "status": status,
        "alive": alive,
        "now": time.time(),
        "metrics": b"\n".join(last.rsplit(b"\n", lines)[-lines:]).decode("utf-8", "replace"),
        "evaluation": _newest_evaluation(metrics)[:LINES_BYTES].decode("utf-8", "replace"),
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
    if not folders:
        return set()
    try:
        states = run("systemctl", "is-active", *(UNIT + folder.name for folder in folders)).stdout.split()
    except FileNotFoundError:
        return set()
    if states and len(states) != len(folders):
        raise OSError(f"systemctl told {len(states)} states of {len(folders)} units")
    return {folders[at] for at, state in enumerate(states) if state in {"active", "deactivating"}}


def details(runs: StrPath) -> list[DetailAnswer]:
    """Of each run's folder, what a list of runs says."""
    return [_detail(folder) for folder in _folders(runs)]


def _detail(folder: Path) -> DetailAnswer:
    used = run("du", "-sk", str(folder)).stdout.split()
    base = re.search(r"^base_model = .*", small(folder / RECIPE), re.MULTILINE)
    cluster = re.search(r'"cluster": *"([a-z0-9-]*)"', small(folder / LAUNCH))
    checkpoints = folder / CHECKPOINTS
    return {
        "run": folder.name,
        "kib": int(used[0]) if used else 0,
        "claim": small(folder / CLAIM),
        "checkpoints": {name: about.st_mtime for name in _names(checkpoints) if (about := look_at(checkpoints / name))},
        "best": small(checkpoints / BEST),
        "first_start": small(folder / STARTS).partition("\n")[0],
        "loadable": exists(folder / "adapter") or exists(folder / "model"),
        "base_model": base[0].strip() if base else "",
        "cluster": cluster[1] if cluster else "",
    }


def checkpoints_of_all(runs: StrPath) -> dict[str, list[str]]:
    """What is in the folders of checkpoints, by run."""
    return {folder.name: _names(folder / CHECKPOINTS) for folder in _folders(runs)}


def _names(folder: Path) -> list[str]:
    """One folder that cannot be read hides no others."""
    try:
        return names(folder)
    except OSError:
        return []


def whole_checkpoint(folder: StrPath, needed: list[str], either: list[list[str]]) -> CheckpointAnswer:
    """Which is whole by its checksums, lists all that is `needed`, and all of one list of `either`."""
    steps = [int(found[1]) for name in names(folder) if (found := re.fullmatch(r"step-([0-9]+)", name))]
    damaged: list[int] = []
    for step in sorted(steps, reverse=True):
        if _is_whole(Path(folder, f"step-{step}"), needed, either):
            return {"whole": step, "damaged": damaged}
        damaged.append(step)
    return {"whole": None, "damaged": damaged}


def _is_whole(folder: Path, needed: list[str], either: list[list[str]]) -> bool:
    try:
        lines = [line.partition("  ") for line in (read(folder / SUMS) or b"").decode("utf-8", "replace").splitlines()]
        sums = {name: digest for digest, _, name in lines}
        listed = sums.keys() >= {*needed} and any(sums.keys() >= {*each} for each in either)
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if is_file(path)}
        return listed and found - {SUMS} == sums.keys() and all(sha256(folder / name) == sums[name] for name in sums)
    except OSError:
        return False


# Starts


def starting(runs: StrPath) -> list[str] | None:
    """The runs that are being prepared while somebody holds the lock of starts; None where nobody does."""
    if not is_directory(runs):
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
    return [folder.name for folder in _folders(runs) if exists(folder / PREPARING)]


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
        _remove_in_use(Path(folder))


def _remove_in_use(folder: Path, tries: int = 20) -> None:
    """Its supervisor, which ends when the folder is gone, may write there once more."""
    try:
        remove(folder)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or tries == 0:
            raise
        time.sleep(0.1)
        _remove_in_use(folder, tries - 1)


def remove_abandoned(runs: StrPath) -> None:
    """Remove what starts that broke off have left; for who holds the lock of starts."""
    for folder in _folders(runs):
        if is_file(folder / PREPARING) and not exists(folder / STATUS):
            _remove_in_use(folder)


def make_runs(runs: StrPath) -> bool:
    """Make the folder of runs; False where no disk is mounted above it."""
    if run("mountpoint", "-q", str(Path(runs).parent)).returncode:
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
    run_well("tar", "-C", str(folder), "--no-same-owner", "-xzf", str(archive))


def pack(folder: StrPath) -> None:
    """A run that is about to begin as a tar in its own folder, which whoever may read runs can fetch. What tar writes
    into must not be among what it reads."""
    left_out = (f"--exclude=./{name}" for name in (LOGS, PREPARING, CLAIM))
    run_well("tar", "-C", str(folder), *left_out, "-czf", str(Path(folder, PACKED)), ".")


def start_early(argv: list[str]) -> None:
    """Start the supervisor of a run that is not to begin yet."""
    run_well(*argv)


def start(folder: StrPath, argv: list[str], wait_s: float, early: bool) -> bool:
    """Begin a run, by the supervisor that was started `early` or, where that has ended, by a new one; whether it has
    written a status within that time. The old one stays until then: a run without one is not found."""
    Path(folder, STOP).unlink(missing_ok=True)
    before, until = version_of(Path(folder, STATUS)), time.monotonic() + wait_s
    if early:
        Path(folder, GO).touch()
    begun = False
    while version_of(Path(folder, STATUS)) == before:
        if time.monotonic() > until:
            return False
        if not begun and not (early and _active([Path(folder)])):
            run_well(*argv)
            begun = True
        time.sleep(0.02)
    return True


VERBS = (
    *(look, looks, details, checkpoints_of_all, whole_checkpoint),
    *(starting, reserve, discard, remove_abandoned, make_runs, own_runs, pack, unpack, start_early, start),
)


def version_of(path: Path) -> tuple[int, int]:
    """What tells a file from the one that was put in its place: the number alone is given to the next one."""
    about = look_at(path)
    return (about.st_ino, about.st_mtime_ns) if about else (0, 0)
