"""Bring a run home: its best checkpoint that is whole, metrics and logs; resumable, checked, verified. No torch.

What is half fetched is called `.part` and gone on with; a checkpoint folder gets its name only when whole. The
optimizer's state, several times the adapter's size and of use on the head alone, comes only when asked for.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paramiko import SSHException

from training.laptop import runs
from training.laptop.download import Download, FileGone, another, refuse_another
from training.laptop.follow import ROOT, watch
from training.laptop.head_node import Head, HeadError, RemoteHead
from training.laptop.open_cluster import language_here
from training.laptop.run_look import RunLook
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
    LOCAL_RUNS,
    MEASURED,
    MERGED,
    METRICS,
    MODEL_RECORD,
    MODEL_SUMS,
    PLAN,
    PROFILE,
    RECIPE,
    REPORT,
    REPORT_FACTS,
    STATUS,
    VERSIONS,
    checkpoint_folder,
    newest_step,
    parse_status,
)
from training.run.history import RECORD as BEGAN_WITH
from training.run.history import STARTS
from training.text.counts import size_text
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


WATCH_EVERY_S = 5.0
MAKING_S = 120.0


def collect_results(head: Head, run_id: str, full: bool = False) -> int | None:
    """Fetch a run, verify it, say what came; gives the step of its checkpoint. `full`: the optimizer's state too."""
    if isinstance(head, RemoteHead):
        fetched = fetch_patiently(head.open_sftp, head.close, str(head.runs / run_id), LOCAL_RUNS / run_id, full)
    else:
        fetched = fetch_here(head.runs / run_id)
    for phrase in fetched.damaged:
        print(f"passed over: {phrase}")
    if fetched.step is None:
        goes_on = "yet; the run goes on" if runs.look(head, run_id).active else "on the head"
        print(f"{fetched.folder}: metadata and logs, there is no checkpoint {goes_on}")
    else:
        chosen = fetched.newest != fetched.step and not fetched.damaged
        best = f", the best by validation loss; the newest is step {fetched.newest}"
        print(
            f"fetched {fetched.folder}: {fetched.part} of step {fetched.step}"
            f"{best if chosen else ''}; it is in {fetched.folder}/{fetched.part}, verified "
            f"({size_text(fetched.bytes_moved)} moved)"
        )
    made = isinstance(head, RemoteHead) and make_page(fetched.folder)
    if made or (head.here and (fetched.folder / REPORT).exists()):
        print(f"how it went: {fetched.folder / REPORT}")
    return fetched.step


def print_results_place(head: Head, run_id: str) -> None:
    """After a run that was only followed: what it learned, verified, where it ran on this machine; else the command
    that brings it home. Nothing of a check, and nothing where there is no checkpoint."""
    if not runs.is_training(run_id) or runs.checkpoint_step(head, run_id) is None:
        return
    if head.here:
        collect_results(head, run_id)
        print_next_commands(head, run_id)
    else:
        print(f"next: fab fetch --run {run_id} brings home what it learned")


def print_next_commands(head: Head, run_id: str) -> None:
    """What to type once an adapter is home."""
    where = f"--run {run_id}{' --here' if head.here else ''}"
    home = head.runs if head.here else LOCAL_RUNS
    measures = "measures both on its validation split" if _has_split(home / run_id) else "--data FILE measures both"
    begin = "next" if _is_finished(home / run_id) else "what it has learned so far"
    print(f"{begin}: fab generate {where} asks it and its base; fab evaluate {where} {measures}")


def _is_finished(run: Path) -> bool:
    """Whether a run at home was at its end when it came there."""
    try:
        return parse_status((run / STATUS).read_text(encoding="utf-8")).state == "finished"
    except (OSError, ValueError):
        return False


def _has_split(run: Path) -> bool:
    """Whether a run at home held some of its data out."""
    try:
        recipe = tomllib.loads((run / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(recipe.get("validation", {}).get("fraction"))


def fetch_until_over(head: Head, run_id: str, step: int | None, full: bool = False) -> None:
    """Fetch every new checkpoint, or every new best one, until the run is over."""

    def look_and_fetch() -> RunLook:
        nonlocal step
        seen = runs.look(head, run_id)
        if (wanted := runs.checkpoint_step(head, run_id)) != step:
            try:
                collect_results(head, run_id, full)
            except FetchInterrupted as error:
                raise HeadError(str(error)) from error  # to be patient with
            step = wanted  # what came may be another, where this one is damaged
        return seen

    watch(look_and_fetch, lambda seen: None, HeadError, every_s=WATCH_EVERY_S)
    collect_results(head, run_id, full)


def _is_of_now(page: Path, language: str) -> bool:
    """Whether a page is in this language and was made after every other file of its run, and the code, came."""
    if not page.is_file() or f'<html lang="{language}' not in page.read_text(encoding="utf-8", errors="replace")[:100]:
        return False
    run, code = page.parent.rglob("*"), (ROOT / "training" / "node" / "metrics").iterdir()
    others = (path for path in (*run, *code) if path.is_file() and path.name not in (REPORT, FETCHED))
    return page.stat().st_mtime_ns > max(path.stat().st_ctime_ns for path in others)


def make_page(run: Path) -> Path | None:
    """The page of a fetched run, made on this machine of data, as a page of the head's could hold anything.

    None, and a sentence, where it cannot be made."""
    page, language = run / REPORT, language_here()
    if _is_of_now(page, language):
        return page
    page.unlink(missing_ok=True)
    if not (run / METRICS).is_file():
        return None
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{page} is not made: its curves need matplotlib on this machine: pip install matplotlib")
        return None
    began, flags = time.time(), ["--run", str(run.resolve()), "--language", language]
    argv = [sys.executable, "-P", "-m", "training.node.metrics.report", *flags]  # -P: nothing fetched is imported
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=env, capture_output=True, errors="replace", timeout=MAKING_S, check=False
        )
        why = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"no end within {MAKING_S:.0f} s"
    if why:
        print(f"{page} cannot be made of what the head sent: {why}")
        return None
    os.utime(page, (began, began))  # what came meanwhile is newer
    return page
