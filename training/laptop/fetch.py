"""Bring a run home: its best checkpoint that is whole, metrics and logs; resumable, checked, verified. No torch.

What is half fetched is called `.part` and gone on with; a checkpoint folder gets its name only when whole. The
optimizer's state, several times the adapter's size and of use on the head alone, comes only when asked for.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paramiko import SSHException

from training.laptop.download import Download, FileGone, another, refuse_another
from training.run.checkpoint_files import (
    DamagedError,
    FetchError,
    check_sums,
    link,
    link_checkpoint,
    parsed_sums,
    part_of,
    planned_base_models,
    sums_at,
    take_undamaged,
    verify_checkpoint,
)
from training.run.evaluations import is_evaluation
from training.run.folder import (
    CHECKPOINTS,
    CLAIM,
    FETCHED,
    HANG,
    LAUNCH,
    MEASURED,
    MERGED,
    MODEL_RECORD,
    MODEL_SUMS,
    PLAN,
    PROFILE,
    RECIPE,
    REPORT_FACTS,
    VERSIONS,
    checkpoint_folder,
    newest_step,
)
from training.run.history import RECORD as BEGAN_WITH
from training.run.history import STARTS
from training.text.files import BEST, OPTIMIZER, SUMS, sums_text
from training.text.problems import FAILED

if TYPE_CHECKING:
    from paramiko import SFTPClient

TRIES, RETRY_AFTER_S = 3, 2.0
SINGLE_FILES = (
    RECIPE,
    PLAN,
    LAUNCH,
    MODEL_RECORD,
    MODEL_SUMS,
    "metrics.jsonl",
    "status.json",
    "result.json",
    CLAIM,
    BEGAN_WITH,
    STARTS,
    REPORT_FACTS,
    VERSIONS,
    "data/report.json",
    "prove.json",
    "calibration.json",
    MEASURED,
)
TREES = ("logs", "tb", "wandb", HANG)
"""Folders fetched with all that is in them; an offline run of wandb goes to its server from here: wandb sync."""
CODE = (".py", ".pyc", ".so", ".pth")
"""Nothing that a Python started in that folder would import comes along."""
METADATA_BYTES = 256 << 20
"""Of a file that is read whole, as metrics.jsonl: two million steps."""


class FetchInterrupted(FetchError):
    """The head went away; what came stays, and the next fetch goes on with it."""

    exit_code = FAILED


@dataclass(frozen=True)
class Fetched:
    """What is home now."""

    folder: Path
    step: int | None
    """Of the checkpoint; None where the run has none."""
    bytes_moved: int
    newest: int | None = None
    """Step of the newest checkpoint there is: beyond `step` where an earlier one is the best."""
    damaged: tuple[str, ...] = ()
    """What is wrong with checkpoints that would have come before this one, a phrase each."""

    @property
    def part(self) -> str:
        """What was learned: an adapter, or a whole model. A folder of that name leads to it."""
        return part_of(self.folder / checkpoint_folder(self.step or 0))


def fetch_remote(open_sftp: Callable[[], SFTPClient], remote: str, local: Path, full: bool = False) -> Fetched:
    """Fetch a run folder's metadata, logs and best or newest checkpoint, verified; `full` with the optimizer.

    Raises FetchError where no checkpoint is whole or the adapter is not what the run should have made, and where
    the folder at home is of another run.
    """
    download = Download(open_sftp, remote, local)
    remote_names = {*download.names("."), *(f"data/{name}" for name in download.names("data"))}
    refuse_another(download, remote_names, newest_step(download.names(CHECKPOINTS)), local)
    logs = [name for tree in TREES if tree in remote_names for name in download.tree(tree) if not name.endswith(CODE)]
    logs += [f"{PROFILE}/{name}" for name in download.names(PROFILE) if name in MERGED]
    local.mkdir(parents=True, exist_ok=True)
    (local / FETCHED).write_text(f"{remote}\n", encoding="utf-8")
    metadata = [n for n in remote_names if n in SINGLE_FILES or n.startswith("recipe.before-") or is_evaluation(n)]
    download.all([(name, local / name, None) for name in metadata], METADATA_BYTES)
    download.all([(name, local / name, None) for name in logs])
    names = download.names(CHECKPOINTS)
    best = download.text(f"{CHECKPOINTS}/{BEST}") if BEST in names else ""
    step, damaged = take_undamaged(names, best, lambda step: _fetch_checkpoint(download, local, step, full))
    return Fetched(local, step, download.moved, newest_step(names), damaged)


def fetch_patiently(
    open_sftp: Callable[[], SFTPClient], reconnect: Callable[[], None], remote: str, local: Path, full: bool = False
) -> Fetched:
    """`fetch_remote`, gone on with after a broken connection or when a checkpoint gave way to a newer one."""
    for left in reversed(range(TRIES)):
        try:
            return fetch_remote(open_sftp, remote, local, full)
        except FileGone:
            if not left:
                raise
        except (EOFError, OSError, SSHException) as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise FetchError(f"{local}: no space left on this machine's disk") from error
            if getattr(error, "filename", None):
                raise FetchError(f"{error} on this machine") from error
            reconnect()
            if not left:
                raise FetchInterrupted(
                    f"the head went away {TRIES} times while {local} was fetched "
                    f"({error or type(error).__name__}); fetch again to go on"
                ) from error
        time.sleep(RETRY_AFTER_S)
    raise AssertionError("unreachable")


def fetch_here(folder: Path) -> Fetched:
    """The same for a run on this machine, which is home already: find its checkpoint and verify it."""
    laid = link_checkpoint(folder)
    return Fetched(folder, laid.step, 0, laid.newest, laid.damaged)


def _check_home(folder: Path, sums: dict[str, str]) -> None:
    """The copy of an earlier fetch: what is on the head is whole, as far as is known."""
    try:
        check_sums(folder, sums)
    except DamagedError as error:
        raise FetchError(f"{error}; delete {folder} and fetch again") from error


def _fetch_checkpoint(download: Download, local: Path, step: int, full: bool) -> None:
    name = checkpoint_folder(step)
    home = local / name
    fresh = home.with_name(f".{home.name}")
    wanted = parsed_sums(download.text(f"{name}/{SUMS}"), name)
    if missing := sorted(wanted.keys() - {file.removeprefix(f"{name}/") for file in download.tree(name)}):
        raise DamagedError(f"{name} is damaged: {missing[0]} is missing")
    if not full:
        wanted.pop(OPTIMIZER, None)
    have = sums_at(home)
    if wanted.items() <= have.items():
        _check_home(home, have)
        verify_checkpoint(home, planned_base_models(local))
    else:
        if differs := sorted(file for file in wanted if have.get(file, wanted[file]) != wanted[file]):
            raise another(local, f"{name}/{differs[0]} is another")
        _take_over(home, fresh, {file for file, digest in wanted.items() if have.get(file) == digest})
        download.all([(f"{name}/{file}", fresh / file, digest) for file, digest in wanted.items()])
        for path in fresh.rglob("*"):
            if path.is_file() and str(path.relative_to(fresh)) not in wanted:
                path.unlink()  # of an earlier try, which wanted more
        (fresh / SUMS).write_text(sums_text(wanted), encoding="utf-8")
        check_sums(fresh, wanted)
        verify_checkpoint(fresh, planned_base_models(local))
        _replace(home, fresh)
    link(local, Path(name))


def _take_over(home: Path, fresh: Path, files: set[str]) -> None:
    """What an earlier fetch brought need not travel again."""
    for file in files:
        if (home / file).is_file() and not (fresh / file).exists():
            (fresh / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(home / file, fresh / file)


def _replace(home: Path, fresh: Path) -> None:
    """A folder cannot replace one that is not empty: the old one steps aside first."""
    aside = home.with_name(f".old-{home.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if home.exists():
        home.rename(aside)
    fresh.rename(home)
    shutil.rmtree(aside, ignore_errors=True)
