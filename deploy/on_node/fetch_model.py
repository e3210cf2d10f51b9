"""Fetch one model from the hub into a folder, every file checked against what the hub announced.

Runs on the head with the Python of /data/env, whose `hf` does the transfer, where training/ and the deploy's
programs were unpacked. Standard input is the hub token (or nothing); standard output is the resolved commit. COMMIT is
the one that the revision stood for when it was first fetched, "" where this is the first time.

    python3 -m deploy.on_node.fetch_model REPO REVISION COMMIT FOLDER < token

What a hub answers is data: a name that leads out of the folder ends the fetch, and the token is shown only to a
hub that asks for one and that it is meant for (training/models/hub.py).

A file of the wrong size or content is removed and fetched again. `hf` continues a broken transfer as long
as it runs; since huggingface_hub 1.18 it keeps no half files for the next start, so few files are fetched
at once.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import file_digest, sha1
from pathlib import Path
from typing import Any

from training.models.hub import (
    OWN_HOST,
    Hub,
    HubError,
    SilentHubError,
    commit_id,
    file_name,
    hub_of,
    place_of,
    without_tokens,
)
from training.text.files import LICENCE, MODEL, SUMS, is_one_of, sha256_of


class ModelError(Exception):
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
            return sha256_of(file) == self.sha256
        with file.open("rb") as content:
            return file_digest(content, lambda: sha1(b"blob %d\0" % self.size)).hexdigest() == self.git_id


@dataclass(frozen=True)
class Listing:
    """A revision as the hub has it, and the token that opens its files; None where they are open to all."""

    commit: str
    files: list[Announced]
    token: str | None


def wanted(files: Iterable[Announced]) -> list[Announced]:
    """The files of a model and its licence; none where it has no weights that are read."""
    files = [file for file in files if is_one_of(file.path, (*MODEL, *LICENCE))]
    return files if any(file.path.endswith(".safetensors") for file in files) else []


def listed(hub: Hub, repo: str, revision: str) -> Listing:
    """A revision as the hub has it now; the token is tried only where the hub wants one."""
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    shown: list[str] = []

    def told(token: Any) -> Any:
        shown.extend([token] if token else [])
        return HfApi(hub.address, token=token).model_info(repo, revision=revision, files_metadata=True)

    try:
        info = hub.told(told)
        commit, files = commit_id(info.sha), [_announced(sibling) for sibling in info.siblings or []]
        if files and not shown:  # of a gated model the list is open, the files are not
            url = hf_hub_url(repo, files[0].path, revision=commit, endpoint=hub.address)

            def looked(token: Any) -> None:
                shown.extend([token] if token else [])
                get_hf_file_metadata(url, token=token, endpoint=hub.address)

            hub.asked(looked)
    except GatedRepoError:
        raise ModelError(f"{repo} is gated: accept its licence on its page, and {hub.how_to_enter}") from None
    except RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise ModelError(f"{hub.address} knows no model {repo}, or it is private: then {hub.how_to_enter}") from None
    except HfHubHTTPError as error:
        raise ModelError(f"{hub.address} answered {error.response.status_code} for {repo}") from None
    except (HTTPError, OSError) as error:
        raise ModelError(f"{hub.address} cannot be reached: {error}; {hub.another}") from None
    except SilentHubError as error:
        raise ModelError(f"{error}; {hub.another}") from None
    except HubError as error:
        raise ModelError(f"{hub.address} answered for {repo}: {error}; nothing was fetched or removed") from None
    return Listing(commit, files, shown[-1] if shown else None)


def _announced(sibling: Any) -> Announced:
    """One file of a hub's answer, which may hold anything."""
    size = sibling.size or 0
    if not isinstance(size, int) or size < 0:
        raise HubError(f"{size!r} is no size of a file")
    sha256 = sibling.lfs.sha256 if sibling.lfs else None
    if not sha256 and not sibling.blob_id:
        raise HubError(f"{sibling.rfilename!r} has no digest, so its content cannot be checked")
    return Announced(file_name(sibling.rfilename), size, sibling.blob_id, sha256)


ATTEMPTS = 3
ROUNDS = 2
AT_ONCE = 4
"""Files in flight, and so at most lost when the machine stops; the hub's servers fill a line with fewer."""
RESERVE_BYTES = 1 << 30


def remove_wrong(folder: Path, files: Iterable[Announced]) -> list[str]:
    """Remove every present file that is not the announced one; returns their paths."""
    removed = []
    for file in files:
        place = _place(folder, file.path)
        if place.exists() and not file.is_at(place):
            _remove(place)
            # else `hf` takes the file for present
            _place(folder, f".cache/huggingface/download/{file.path}.metadata").unlink(missing_ok=True)
            removed.append(file.path)
    return removed


def remove_stale(folder: Path, files: Iterable[Announced]) -> None:
    """Remove what an earlier revision had and this one has not: a stray shard would be loaded too."""
    manifest = folder / SUMS
    if manifest.is_file():
        before = {line.partition("  ")[2] for line in manifest.read_text().splitlines() if not line.startswith("#")}
        for path in before - {"", *(file.path for file in files)}:
            _remove(_place(folder, path))


def _place(folder: Path, path: str) -> Path:
    try:
        return place_of(folder, path)
    except HubError as error:
        raise ModelError(f"{folder}: {error}; nothing was removed there") from None


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def refuse_if_short_of_space(folder: Path, files: Iterable[Announced]) -> None:
    """ModelError unless what is still missing fits, with a gibibyte to spare."""
    missing = sum(file.size for file in files if not (folder / file.path).exists())
    free = shutil.disk_usage(folder).free
    if missing and missing + RESERVE_BYTES > free:
        need, have = f"{math.ceil(missing / 2**30 * 10) / 10} GiB", f"{free / 2**30:.1f} GiB"
        raise ModelError(f"{folder} needs {need} more and 1 GiB to spare, but {have} are free")


def download(repo: str, listing: Listing, folder: Path, files: list[Announced], hub: Hub) -> None:
    """`hf download` of the files still missing."""
    missing = [file.path for file in files if not (folder / file.path).exists()]
    if not missing:
        return
    command = [str(Path(sys.executable).with_name("hf")), "download", "--revision", listing.commit]
    # after `--` no file's name is read as an option
    command += ["--local-dir", str(folder), "--max-workers", str(AT_ONCE), "--", repo, *missing]
    for attempt in range(1, ATTEMPTS + 1):
        _say(f"fetching {len(missing)} file{'s' * (len(missing) != 1)} of {repo}, attempt {attempt}")
        done = subprocess.run(
            command, env=_environment(folder, listing.token, hub), capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        if attempt < ATTEMPTS:
            time.sleep(float(os.environ.get("SPOTUNE_RETRY_DELAY_S", "5")))
    error_lines = [line.strip() for line in done.stderr.splitlines() if line.strip() and "Hint:" not in line]
    why = re.sub(r"^[\w.]+(Error|Exception): ", "", error_lines[-1]) if error_lines else f"exit code {done.returncode}"
    raise ModelError(f"{repo} could not be fetched from {hub.address} in {ATTEMPTS} attempts: {why}; {hub.another}")


def _environment(folder: Path, token: str | None, hub: Hub) -> dict[str, str]:
    more = {
        "HF_ENDPOINT": hub.address,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "NO_COLOR": "1",
        # Xet keeps gigabytes of chunks there: on the data disk, and gone with the rest of .cache
        "HF_HOME": str(folder / ".cache/home"),
    }
    if token:
        more |= {"HF_TOKEN": token, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0"}
    if hub.host != OWN_HOST:
        # Xet's servers come from the hub's answers, not from the mirror
        more["HF_HUB_DISABLE_XET"] = "1"
    return {**without_tokens(), **more}


def fetch(hub: Hub, repo: str, revision: str, pinned: str, folder: Path) -> str:
    """Make folder hold the revision's files, verified; returns the commit.

    `pinned`: the commit that the revision was when it was first fetched; that one is fetched, wherever it points now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A fetch whose terminal went away may still be running: wait for it instead of writing beside it.
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        if pinned and (now := listed(hub, repo, revision).commit) != pinned:
            taken = f"{pinned[:12]} is fetched, as models.lock says"
            _say(f"{repo} was changed: its {revision} is {now[:12]} by now; {taken}")
        return _fetch(hub, repo, pinned or revision, folder)
    finally:
        os.close(lock)


def _fetch(hub: Hub, repo: str, revision: str, folder: Path) -> str:
    listing = listed(hub, repo, revision)
    if re.fullmatch(r"[0-9a-f]{40}", revision) and listing.commit != revision:
        raise ModelError(f"{hub.address} was asked for commit {revision} of {repo} and answered {listing.commit}")
    files = wanted(listing.files)
    if not files:
        raise ModelError(f"{repo} has no weights in safetensors files at {revision}")
    remove_stale(folder, files)
    remove_wrong(folder, files)
    for half in folder.glob(".cache/huggingface/download/**/*.incomplete"):
        half.unlink()
    for _ in range(ROUNDS):
        refuse_if_short_of_space(folder, files)
        download(repo, listing, folder, files, hub)
        wrong = remove_wrong(folder, files)
        if not wrong:
            shutil.rmtree(folder / ".cache", ignore_errors=True)
            return listing.commit
        _say(f"not what the hub announced, fetched again: {', '.join(wrong)}")
    raise ModelError(f"the hub sends other content than it announces: {', '.join(wrong)} of {repo}")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    repo, revision, pinned, folder = arguments
    try:
        hub = hub_of(os.environ, sys.stdin.readline().strip() or None)
        print(fetch(hub, repo, revision, pinned, Path(folder)))
    except (ModelError, HubError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
