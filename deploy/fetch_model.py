"""Fetch one model from the hub into a folder, every file checked against what the hub announced.

Runs on the head with the Python of /data/env, whose `hf` does the transfer; imports nothing of ours.
Standard input is the hub token (or nothing); standard output is the resolved commit.

    python3 fetch_model.py REPO REVISION FOLDER < token

A file of the wrong size or content is removed and fetched again. `hf` continues a broken transfer as long
as it runs; since huggingface_hub 1.18 it keeps no half files for the next start, so few files are fetched
at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ATTEMPTS = 3
ROUNDS = 2
AT_ONCE = 4
"""Files in flight, and so at most lost when the machine stops; the hub's servers fill a line with fewer."""
RESERVE_BYTES = 1 << 30
# The same weights once more in other formats, skipped where safetensors are there.
OTHER_FORMATS = (".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack", ".ot")


class FetchError(Exception):
    """The model cannot be had; the message says why in one sentence."""


@dataclass(frozen=True)
class Announced:
    """One file as the hub describes it: its git object id, or its sha256 if stored apart (LFS, Xet)."""

    path: str
    size: int
    git_id: str | None
    sha256: str | None

    def is_at(self, file: Path) -> bool:
        """Whether the file's content is the announced one."""
        if not file.is_file() or file.stat().st_size != self.size:
            return False
        if self.sha256:
            return _digest(file, hashlib.sha256()) == self.sha256
        return not self.git_id or _digest(file, hashlib.sha1(b"blob %d\0" % self.size)) == self.git_id


def wanted(files: Iterable[Announced]) -> list[Announced]:
    """The files a training needs: all but other formats of the same weights."""
    files = list(files)
    if not any(file.path.endswith(".safetensors") for file in files):
        return files
    return [
        file
        for file in files
        if not file.path.endswith(OTHER_FORMATS) and not file.path.startswith(("original/", "onnx/"))
    ]


def announced(repo: str, revision: str, token: str | None) -> tuple[str, list[Announced]]:
    """(commit, files) of a revision as the hub has it now."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = os.environ.get("HF_ENDPOINT", "the model hub")
    try:
        info = HfApi(token=token).model_info(repo, revision=revision, files_metadata=True)
    except GatedRepoError:
        raise FetchError(f"{repo} is gated: accept its licence on its page and set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise FetchError(f"{repo} has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise FetchError(f"{hub} knows no model {repo}, or it is private and HF_TOKEN is not set") from None
    except HfHubHTTPError as error:
        raise FetchError(f"{hub} answered {error.response.status_code} for {repo}") from None
    except (HTTPError, OSError) as error:
        raise FetchError(f"{hub} cannot be reached: {error}") from None
    files = [
        Announced(s.rfilename, s.size or 0, s.blob_id, s.lfs.sha256 if s.lfs else None) for s in info.siblings or []
    ]
    return str(info.sha), files


def remove_wrong(folder: Path, files: Iterable[Announced]) -> list[str]:
    """Remove every present file that is not the announced one; returns their paths."""
    removed = []
    for file in files:
        place = folder / file.path
        if place.exists() and not file.is_at(place):
            place.unlink()
            # else `hf` takes the file for present
            (folder / f".cache/huggingface/download/{file.path}.metadata").unlink(missing_ok=True)
            removed.append(file.path)
    return removed


def remove_stale(folder: Path, files: Iterable[Announced]) -> None:
    """Remove what an earlier revision had and this one has not: a stray shard would be loaded too."""
    manifest = folder / "SHA256SUMS"
    if manifest.is_file():
        before = {line.partition("  ")[2] for line in manifest.read_text().splitlines()}
        for path in before - {"", *(file.path for file in files)}:
            (folder / path).unlink(missing_ok=True)


def refuse_if_short_of_space(folder: Path, files: Iterable[Announced]) -> None:
    """FetchError unless what is still missing fits, with a gibibyte to spare."""
    missing = sum(file.size for file in files if not (folder / file.path).exists())
    free = shutil.disk_usage(folder).free
    if missing and missing + RESERVE_BYTES > free:
        need, have = f"{missing / 2**30:.1f} GiB", f"{free / 2**30:.1f} GiB"
        raise FetchError(f"{folder} needs {need} more and 1 GiB to spare, but {have} are free")


def download(repo: str, commit: str, folder: Path, files: list[Announced], token: str | None) -> None:
    """`hf download` of the files still missing."""
    missing = [file.path for file in files if not (folder / file.path).exists()]
    if not missing:
        return
    command = [str(Path(sys.executable).with_name("hf")), "download", repo, *missing]
    command += ["--revision", commit, "--local-dir", str(folder), "--max-workers", str(AT_ONCE)]
    for attempt in range(1, ATTEMPTS + 1):
        _say(f"fetching {len(missing)} files of {repo}, attempt {attempt}")
        done = subprocess.run(command, env=_environment(folder, token), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if attempt < ATTEMPTS:
            time.sleep(float(os.environ.get("SPOTUNE_RETRY_DELAY_S", "5")))
    said = [line.strip() for line in done.stderr.splitlines() if line.strip() and "Hint:" not in line]
    raise FetchError(f"{repo} could not be fetched in {ATTEMPTS} attempts: {' '.join(said[-1:])}")


def _environment(folder: Path, token: str | None) -> dict[str, str]:
    more = {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "NO_COLOR": "1",
        # Xet keeps gigabytes of chunks there: on the data disk, and gone with the rest of .cache
        "HF_HOME": str(folder / ".cache/home"),
    }
    if token:
        more["HF_TOKEN"] = token
    if "HF_ENDPOINT" in os.environ:
        # Xet's servers come from the hub's answers, not from the mirror
        more["HF_HUB_DISABLE_XET"] = "1"
    return {**os.environ, **more}


def fetch(repo: str, revision: str, folder: Path, token: str | None) -> str:
    """Make folder hold the revision's files, verified; returns the commit."""
    folder.mkdir(parents=True, exist_ok=True)
    # A fetch whose terminal went away may still be running: wait for it instead of writing beside it.
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        return _fetch(repo, revision, folder, token)
    finally:
        os.close(lock)


def _fetch(repo: str, revision: str, folder: Path, token: str | None) -> str:
    commit, all_files = announced(repo, revision, token)
    files = wanted(all_files)
    if not files:
        raise FetchError(f"{repo} has no files at {revision}")
    remove_stale(folder, files)
    remove_wrong(folder, files)
    for half in folder.glob(".cache/huggingface/download/**/*.incomplete"):
        half.unlink()
    for _ in range(ROUNDS):
        refuse_if_short_of_space(folder, files)
        download(repo, commit, folder, files, token)
        wrong = remove_wrong(folder, files)
        if not wrong:
            shutil.rmtree(folder / ".cache", ignore_errors=True)
            return commit
        _say(f"not what the hub announced, fetched again: {', '.join(wrong)}")
    raise FetchError(f"the hub sends other content than it announces: {', '.join(wrong)} of {repo}")


def _digest(file: Path, digest: hashlib._Hash) -> str:
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    repo, revision, folder = arguments
    try:
        print(fetch(repo, revision, Path(folder), sys.stdin.readline().strip() or None))
    except FetchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
