"""Bring a run home: its newest whole checkpoint, metrics and logs; resumable, checked, verified. No torch.

What is half fetched is called `.part` and gone on with; a checkpoint folder gets its name only when whole. The
optimizer's state, several times the adapter's size and of use on the head alone, comes only when asked for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.sums import OPTIMIZER, SUMS, parse_sums, sha256_of, sums_text

if TYPE_CHECKING:
    from paramiko import SFTPClient

CHANNELS = 4
SILENCE_S = 20.0
"""A channel on which nothing moves for this long counts as broken: a vanished head says nothing."""
TRIES, RETRY_AFTER_S = 3, 2.0
CHUNK_BYTES = 1 << 20
SINGLE_FILES = ("recipe.toml", "plan.json", "launch.json", "metrics.jsonl", "status.json", "result.json")
_STEP = re.compile(r"^step-(\d+)$")


class FetchError(RuntimeError):
    """What was fetched is incomplete, damaged, or not what the run should have made."""


class FetchInterrupted(FetchError):
    """The head went away; what came stays, and the next fetch goes on with it."""


class FileGone(FetchError):
    """A file that was there a moment ago is not any more."""


@dataclass(frozen=True)
class Fetched:
    """What is home now."""

    folder: Path
    step: int | None
    """Of the checkpoint; None where the run has none."""
    bytes_moved: int


def newest_step(names: list[str]) -> int | None:
    """The largest N among folder names `step-N`: those are whole, unfinished ones are called otherwise."""
    return max((int(match[1]) for name in names if (match := _STEP.match(name))), default=None)


class Download:
    """Files from one remote folder to a local one, over several channels at once."""

    def __init__(self, open_sftp: Callable[[], SFTPClient], remote: str, local: Path) -> None:
        self.open_sftp, self.remote_folder, self.local = open_sftp, remote, local
        self.moved = 0

    @contextlib.contextmanager
    def channel(self) -> Iterator[SFTPClient]:
        """An sftp channel of its own, closed afterwards."""
        sftp = self.open_sftp()
        if channel := sftp.get_channel():
            channel.settimeout(SILENCE_S)
        try:
            yield sftp
        finally:
            sftp.close()

    @contextlib.contextmanager
    def remote(self, name: str) -> Iterator[SFTPClient]:
        """A channel for one file, whose refusals name the file. Only this machine's own errors have a filename."""
        path = f"{self.remote_folder}/{name}"
        with self.channel() as sftp:
            try:
                yield sftp
            except PermissionError as error:
                if error.filename:
                    raise
                raise FetchError(
                    f"{path} may not be read by the user this machine logs in as; "
                    f"on the head, as root: chmod -R a+rX {self.remote_folder}"
                ) from error
            except FileNotFoundError as error:
                if error.filename:
                    raise
                raise FileGone(f"{path} is not there any more") from error

    def names(self, folder: str) -> list[str]:
        """What is in a remote folder; nothing where there is none."""
        with self.remote(folder) as sftp:
            try:
                return sftp.listdir(f"{self.remote_folder}/{folder}")
            except FileNotFoundError:
                return []

    def text(self, name: str) -> str:
        """A small remote file."""
        with self.remote(name) as sftp, sftp.open(f"{self.remote_folder}/{name}") as file:
            return file.read().decode("utf-8")

    def all(self, names: list[tuple[str, Path, str | None]]) -> None:
        """Fetch (remote name, local path, sha256 or None) in parallel; the first error ends it."""
        with ThreadPoolExecutor(max_workers=CHANNELS) as pool:
            for done in [pool.submit(self._one, *name) for name in names]:
                done.result()

    def _one(self, name: str, target: Path, digest: str | None) -> None:
        if digest and target.exists() and sha256_of(target) == digest:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        with self.remote(name) as sftp:
            if not stat.S_ISREG(sftp.stat(f"{self.remote_folder}/{name}").st_mode or 0):
                return
            resumed = part.exists() and digest is not None
            self._copy(sftp, name, part, resumed)
            if digest and resumed and sha256_of(part) != digest:
                self._copy(sftp, name, part, False)  # the part was of something else
        if digest and sha256_of(part) != digest:
            part.unlink()
            raise FetchError(f"{name} is damaged: its sha256 is not the one in {SUMS}")
        part.replace(target)

    def _copy(self, sftp: SFTPClient, name: str, part: Path, resume: bool) -> None:
        with sftp.open(f"{self.remote_folder}/{name}", "rb") as source, part.open("ab" if resume else "wb") as file:
            size, offset = source.stat().st_size or 0, file.tell()
            if offset > size:
                file.truncate(0)
                offset = 0
            source.seek(offset)
            source.prefetch(size, max_concurrent_requests=64)
            while offset < size and (data := source.read(min(CHUNK_BYTES, size - offset))):
                file.write(data)
                offset += len(data)
                self.moved += len(data)


def fetch_remote(open_sftp: Callable[[], SFTPClient], remote: str, local: Path, full: bool = False) -> Fetched:
    """Fetch a run folder's papers, logs and newest checkpoint, and verify its adapter; `full` with the optimizer.

    Raises FetchError where a file is damaged or the adapter is not what the run should have made.
    """
    download = Download(open_sftp, remote, local)
    there = set(download.names("."))
    papers: list[tuple[str, Path, str | None]] = [(name, local / name, None) for name in SINGLE_FILES if name in there]
    papers += [(f"logs/{name}", local / "logs" / name, None) for name in download.names("logs")]
    download.all(papers)
    step = newest_step(download.names("checkpoints"))
    if step is not None:
        _fetch_checkpoint(download, local, step, full)
    return Fetched(local, step, download.moved)


def fetch_patiently(
    open_sftp: Callable[[], SFTPClient], reconnect: Callable[[], None], remote: str, local: Path, full: bool = False
) -> Fetched:
    """`fetch_remote`, gone on with after a broken connection or when a checkpoint gave way to a newer one."""
    from paramiko import SSHException

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
    """The same for a run on this machine, which is home already: find its newest checkpoint and verify it."""
    checkpoints = folder / "checkpoints"
    step = newest_step([path.name for path in checkpoints.iterdir()]) if checkpoints.is_dir() else None
    if step is not None:
        name = f"checkpoints/step-{step}"
        _check_sums(folder / name, _sums_at(folder / name))
        verify_checkpoint(folder / name, planned_base_model(folder))
        _point(folder / "adapter", Path(name) / "adapter")
    return Fetched(folder, step, 0)


def planned_base_model(folder: Path) -> str | None:
    """The base model's hash a run was started with."""
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return plan.get("base_model_hash")


def _parsed(text: str) -> dict[str, str]:
    try:
        return parse_sums(text)
    except ValueError as error:
        raise FetchError(str(error)) from error


def _sums_at(folder: Path) -> dict[str, str]:
    """What a checkpoint on this machine should hold; nothing where there is none."""
    path = folder / SUMS
    return _parsed(path.read_text(encoding="utf-8")) if path.exists() else {}


def _check_sums(folder: Path, sums: dict[str, str]) -> None:
    for file, digest in sums.items():
        if not (folder / file).is_file() or sha256_of(folder / file) != digest:
            raise FetchError(f"{folder / file} is missing or damaged; delete {folder} and fetch again")


def _fetch_checkpoint(download: Download, local: Path, step: int, full: bool) -> None:
    name = f"checkpoints/step-{step}"
    home, fresh = local / name, local / "checkpoints" / f".step-{step}"
    wanted = _parsed(download.text(f"{name}/{SUMS}"))
    if not full:
        wanted.pop(OPTIMIZER, None)
    have = _sums_at(home)
    if wanted.items() <= have.items():
        _check_sums(home, have)
        verify_checkpoint(home, planned_base_model(local))
    else:
        _take_over(home, fresh, {file for file, digest in wanted.items() if have.get(file) == digest})
        download.all([(f"{name}/{file}", fresh / file, digest) for file, digest in wanted.items()])
        for path in fresh.rglob("*"):
            if path.is_file() and str(path.relative_to(fresh)) not in wanted:
                path.unlink()  # of an earlier try, which wanted more
        (fresh / SUMS).write_text(sums_text(wanted), encoding="utf-8")
        _check_sums(fresh, wanted)
        verify_checkpoint(fresh, planned_base_model(local))
        _replace(home, fresh)
    _point(local / "adapter", Path(name) / "adapter")


def _take_over(home: Path, fresh: Path, files: set[str]) -> None:
    """What an earlier fetch brought need not travel again."""
    for file in files:
        if (home / file).is_file() and not (fresh / file).exists():
            (fresh / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(home / file, fresh / file)


def _replace(home: Path, fresh: Path) -> None:
    """A folder cannot replace one that is not empty: the old one steps aside first."""
    aside = home.with_name(f".old-{home.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if home.exists():
        home.rename(aside)
    fresh.rename(home)
    shutil.rmtree(aside, ignore_errors=True)


def _point(link: Path, target: Path) -> None:
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)


def verify_checkpoint(folder: Path, base_model_hash: str | None) -> None:
    """Open a checkpoint's adapter as a stranger would. Raises FetchError with what is wrong.

    Under ZeRO-3 adapters have been saved with empty tensors that load without an error, so every shape is
    held against the rank the configuration promises.
    """
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    if base_model_hash and state["base_model"] != base_model_hash:
        raise FetchError(
            f"{folder}: trained on another base model than planned "
            f"({state['base_model'][:12]}, planned {base_model_hash[:12]})"
        )
    adapter = folder / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    verify_adapter(adapter / "adapter_model.safetensors", int(config["r"]))


def verify_adapter(path: Path, rank: int) -> None:
    """Every LoRA tensor full-shaped for `rank`, A and B in pairs, B not all zero; else FetchError."""
    header, data_at = read_header(path)
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items() if ".lora_" in name}
    pairs = {name.replace(".lora_A.", ".lora_B.") for name in shapes if ".lora_A." in name}
    b_names = {name for name in shapes if ".lora_B." in name}
    if not pairs or pairs != b_names:
        raise FetchError(f"{path}: its LoRA A and B tensors do not come in pairs")
    for name, shape in shapes.items():
        side = 0 if ".lora_A." in name else 1
        if len(shape) != 2 or 0 in shape or shape[side] != rank:
            raise FetchError(f"{path}: {name} has shape {shape}, which no adapter of rank {rank} has")
    if max(entry["data_offsets"][1] for entry in tensors.values()) != path.stat().st_size - data_at:
        raise FetchError(f"{path}: the file is not as long as its header says")
    with path.open("rb") as file:
        for name in b_names:
            begin, end = tensors[name]["data_offsets"]
            file.seek(data_at + begin)
            if any(file.read(end - begin)):
                return
    raise FetchError(f"{path}: every LoRA B is zero, so the adapter changes nothing")


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and where its data begin: 8 bytes of length, little-endian, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise FetchError(f"{path} is not a safetensors file")
        try:
            return json.loads(file.read(length)), 8 + length
        except ValueError:
            raise FetchError(f"{path} is not a safetensors file") from None
