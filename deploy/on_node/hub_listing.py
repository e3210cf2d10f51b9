"""What a hub announces of a model: which files a revision has, and whether one here is the announced one.

What a hub answers is data: it may hold anything, and nothing is fetched or removed by an answer that does not fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.on_node.probe import MODEL_STAMP
from training.hub_access import Hub, HubError, SilentHubError, commit_id, file_name
from training.sums import SUMS

OUR_FILES = (MODEL_STAMP, SUMS, ".cache")
"""What is written beside a model; a file of its own that begins so is left out."""
# The same weights once more in other formats, skipped where safetensors are there.
OTHER_FORMATS = (".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack", ".ot")


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
            return _digest(file, hashlib.sha256()) == self.sha256
        return _digest(file, hashlib.sha1(b"blob %d\0" % self.size)) == self.git_id


@dataclass(frozen=True)
class Listing:
    """A revision as the hub has it, and the token that opens its files; None where they are open to all."""

    commit: str
    files: list[Announced]
    token: str | None


def wanted(files: Iterable[Announced]) -> list[Announced]:
    """The files a training needs: all but other formats of the same weights, and names that are ours."""
    files = [file for file in files if not file.path.startswith(OUR_FILES)]
    if not any(file.path.endswith(".safetensors") for file in files):
        return files
    return [
        file
        for file in files
        if not file.path.endswith(OTHER_FORMATS) and not file.path.startswith(("original/", "onnx/"))
    ]


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


def _digest(file: Path, digest: hashlib._Hash) -> str:
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
