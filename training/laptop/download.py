"""Files from a remote folder over sftp, resumed and checked; a fetch replaces only an earlier copy of the same run."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from training.run.checkpoint_files import DamagedError, FetchError
from training.run.folder import CHECKPOINTS, CLAIM, METRICS, checkpoint_steps
from training.text.counts import size_text
from training.text.files import SUMS, bounded_json, sha256_of

if TYPE_CHECKING:
    from paramiko import SFTPAttributes, SFTPClient, SFTPFile


T = TypeVar("T")
CHANNELS = 4
SILENCE_S = 20.0
"""A channel on which nothing moves for this long counts as broken: a vanished head says nothing."""
CHUNK_BYTES = 1 << 20
WINDOW_BYTES = 4 << 20
TEXT_BYTES = 16 << 20
"""Longest text that is read into memory: the sums of a checkpoint have some hundred bytes a file."""
DEEPEST = 16
"""Folders within folders: what TensorBoard and wandb write has four."""
MOST_FILES = 20_000
"""In all folders of a run; a rank writes about ten."""
LISTING_S = 60.0
"""For a listing, which a head could go on with for ever."""
RESERVE_BYTES = 1 << 30
"""Of this machine's disk, or a twentieth of a small one: left free whatever a head announces."""


class FileGone(FetchError):
    """A file that was there a moment ago is not any more."""


class Download:
    """Files from one remote folder to a local one, over several channels at once."""

    def __init__(self, open_sftp: Callable[[], SFTPClient], remote: str, local: Path) -> None:
        self.open_sftp, self.remote_folder, self.local = open_sftp, remote, local
        self.moved = self.listed = 0
        self._owed: dict[str, int] = {}
        """Bytes that files on their way still need."""
        self._lock = threading.Lock()

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
                listed = self._in_time(sftp, lambda: sftp.listdir(f"{self.remote_folder}/{folder}"))
                return [one_component(name, folder) for name in listed]
            except FileNotFoundError:
                return []
            except UnicodeDecodeError as error:
                raise self._unreadable(folder) from error

    def _in_time(self, sftp: SFTPClient, listing: Callable[[], list[T]]) -> list[T]:
        """A listing that ends, of not too many files with all before."""
        timer = threading.Timer(LISTING_S, sftp.close)
        timer.start()
        try:
            entries = listing()
        finally:
            timer.cancel()
        self.listed += len(entries)
        if self.listed > MOST_FILES:
            raise FetchError(f"{self.remote_folder}: more than {MOST_FILES} files; what is left was not fetched")
        return entries

    def _unreadable(self, folder: str) -> FetchError:
        return FetchError(f"{self.remote_folder}/{folder}: a file's name there is no UTF-8; nothing of it was fetched")

    def tree(self, folder: str) -> list[str]:
        """Every regular file below a remote folder; links are not followed."""
        if folder.count("/") > DEEPEST:
            raise FetchError(f"{self.remote_folder}: folders within folders, more than {DEEPEST} deep; nothing fetched")
        with self.remote(folder) as sftp:
            try:
                entries = self._in_time(sftp, lambda: sftp.listdir_attr(f"{self.remote_folder}/{folder}"))
            except UnicodeDecodeError as error:
                raise self._unreadable(folder) from error
        files = []
        for entry in entries:
            name, mode = f"{folder}/{one_component(entry.filename, folder)}", entry.st_mode or 0
            if stat.S_ISDIR(mode):
                files += self.tree(name)
            elif stat.S_ISREG(mode):
                files.append(name)
        return files

    def text(self, name: str) -> str:
        """A small remote file."""
        return self.start_of(name, TEXT_BYTES).decode("utf-8", "replace")

    def start_of(self, name: str, length: int) -> bytes:
        """The first bytes of a remote file."""
        with self.remote(name) as sftp, sftp.open(f"{self.remote_folder}/{name}") as file:
            return file.read(length)

    def all(self, names: list[tuple[str, Path, str | None]], most: int = 1 << 62) -> None:
        """Fetch (remote name, local path, sha256 or None) in parallel, none larger than `most`; the first error ends
        it, and none is begun after it."""
        with ThreadPoolExecutor(max_workers=CHANNELS) as pool:
            try:
                for done in [pool.submit(self._one, *name, most) for name in names]:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _one(self, name: str, target: Path, digest: str | None, most: int) -> None:
        if digest and target.exists() and sha256_of(target) == digest:
            return
        self._stay_inside(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        with self.remote(name) as sftp:
            attributes = sftp.lstat(f"{self.remote_folder}/{name}")
            if not stat.S_ISREG(attributes.st_mode or 0) or (not digest and _is_as_fetched(target, attributes)):
                return
            size, have = attributes.st_size or 0, part.stat().st_size if digest and part.exists() else 0
            resumed = 0 < have <= size
            if size > most:
                raise FetchError(f"{self.remote_folder}/{name} has {size_text(size)}, more than {size_text(most)}")
            try:
                with self._room_for(name, size, have if resumed else 0):
                    self._copy(sftp, name, part, size, resumed)
                    if resumed and sha256_of(part) != digest:  # the part was of something else
                        with self._lock:  # before its bytes are given back, and not while another looks at the disk
                            self._owed[name] = size
                        self._copy(sftp, name, part, size, False)
            except BaseException:
                if not digest:  # nothing can go on with it
                    part.unlink(missing_ok=True)
                raise
        if digest and sha256_of(part) != digest:
            part.unlink()
            raise DamagedError(f"{name} is damaged: its sha256 is not the one in {SUMS}")
        os.utime(part, (attributes.st_mtime or 0, attributes.st_mtime or 0))
        part.replace(target)

    def _stay_inside(self, target: Path) -> None:
        folder = self.local.resolve()
        if not target.parent.resolve().is_relative_to(folder):
            raise FetchError(f"{target} would lie outside {folder}; nothing was written there")

    @contextlib.contextmanager
    def _room_for(self, name: str, size: int, resumed_bytes: int) -> Iterator[None]:
        """Inside, what is missing of a file is held against the disk, with what the others still need."""
        with self._lock:
            owed = sum(self._owed.values())  # first: bytes that are written meanwhile count twice, not never
            disk = shutil.disk_usage(self.local)
            reserve = min(RESERVE_BYTES, disk.total // 20)
            free = disk.free - reserve - owed
            if size - resumed_bytes > free:
                raise FetchError(
                    f"{self.remote_folder}/{name} is announced with {size_text(size)}, and this machine's disk has "
                    f"{size_text(max(0, free))} left at {self.local}; {size_text(reserve)} stay free"
                )
            self._owed[name] = size - resumed_bytes
        try:
            yield
        finally:
            del self._owed[name]

    def _copy(self, sftp: SFTPClient, name: str, part: Path, size: int, resume: bool) -> None:
        """The first `size` bytes, which is what was announced, however much is sent."""
        with _opened(part, resume) as file:
            for data in _read_ahead(sftp, f"{self.remote_folder}/{name}", file.tell(), size):
                file.write(data)
                self.moved += len(data)
                self._owed[name] -= len(data)


def _read_ahead(sftp: SFTPClient, path: str, offset: int, size: int) -> Iterator[bytes]:
    """A remote file from `offset` to `size`, or to its end where that comes before.

    In windows, each by a handle of its own, the next one asked for while one comes: where answers overtake requests,
    paramiko's prefetch (sftp_file.py, `_prefetch_done`) ends too early and asks for the rest of what it had been told
    to fetch a second time, piece by piece.
    """
    starts = range(offset, size, WINDOW_BYTES)
    handles = (_asked_for(sftp, path, start, min(start + WINDOW_BYTES, size)) for start in starts)
    ahead = next(handles, None)
    while ahead is not None:
        (window, left), ahead = ahead, next(handles, None)
        with window:
            while left > 0 and (data := window.read(min(CHUNK_BYTES, left))):
                left -= len(data)
                yield data
        if left > 0:
            return


def _asked_for(sftp: SFTPClient, path: str, start: int, end: int) -> tuple[SFTPFile, int]:
    """A handle to which these bytes are on their way, and how many."""
    window = sftp.open(path, "rb")
    window.seek(start)
    window.prefetch(end)
    return window, end - start


def one_component(name: str, folder: str) -> str:
    """A name that a listing of `folder` gave, where it can be one; FetchError for one that leads elsewhere."""
    if name in {"", ".", ".."} or "/" in name or "\\" in name or not name.isprintable():
        raise FetchError(f"the head lists {name!r} in {folder}, which is no file's name; nothing of it is fetched")
    return name


def _opened(part: Path, resume: bool) -> IO[bytes]:
    """A link of that name is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_APPEND if resume else os.O_TRUNC)
    file = os.fdopen(os.open(part, flags, 0o644), "ab" if resume else "wb")
    file.seek(0, os.SEEK_END)
    return file


def _is_as_fetched(target: Path, attributes: SFTPAttributes) -> bool:
    """Whether a file has kept size and time since it came, as rsync looks."""
    if not attributes.st_mtime or not target.is_file():
        return False
    here = target.stat()
    return (here.st_size, int(here.st_mtime)) == (attributes.st_size, attributes.st_mtime)


def refuse_another(download: Download, remote_names: Collection[str], newest: int | None, local: Path) -> None:
    """FetchError where `local` has what the head's run does not go back to. `remote_names`: what is in the head's
    folder; `newest`: the step of its newest checkpoint."""
    if why := _difference(download, remote_names, newest, local):
        raise another(local, why)


def another(local: Path, why: str) -> FetchError:
    """The refusal, with the way out."""
    move = shlex.join(["mv", str(local), f"{local}.kept"])
    return FetchError(
        f"{local} is not an earlier copy of this run: {why}. Nothing of it was replaced; "
        f"to have both: {move}, then fetch again"
    )


def _difference(download: Download, remote_names: Collection[str], newest: int | None, local: Path) -> str:
    if (local / CLAIM).is_file():
        mine = (local / CLAIM).read_bytes()
        if CLAIM not in remote_names or download.start_of(CLAIM, len(mine) + 1) != mine:
            return "it is another start's, of the same second"
    steps = checkpoint_steps(path.name for path in (local / CHECKPOINTS).glob("*"))
    if not steps:
        return ""
    if newest is None or newest < max(steps):
        return f"it has step {max(steps)}, and the head {f'only step {newest}' if newest else 'no checkpoint'}"
    lines = learned(local / METRICS, max(steps))
    if lines and (METRICS not in remote_names or download.start_of(METRICS, len(lines)) != lines):
        return f"the head's went another way to step {max(steps)}"
    return ""


def learned(metrics: Path, step: int) -> bytes:
    """The lines of metrics.jsonl up to a step. With the time each was written they are one run's alone, and whoever
    goes on from that step's checkpoint keeps them."""
    lines = b""
    for line in metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else ():
        try:
            at = int(bounded_json(line.decode())["step"])
        except (KeyError, OverflowError, TypeError, ValueError):  # a line that was cut: the rest is no proof
            break
        if at > step:
            break
        lines += line
    return lines
