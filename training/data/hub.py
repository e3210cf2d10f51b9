"""A data set of the Hub, downloaded once: only its data files, of the training split where it has one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from training.data.delimited import DELIMITERS
from training.data.readers import ARROW, JSON_LINES, NO_DATA, PARQUET, SPLITS, SUFFIXES, words_in
from training.data.sample import DataError
from training.models.hub import NO_ENTRY, Hub, HubError, SilentHubError, commit_id, file_name, hub_of

POINTER = ".hub"
"""Suffix of a run's data file that holds a data set's name instead of records."""
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_KINDS = ({PARQUET}, JSON_LINES, {".json"}, DELIMITERS.keys(), {ARROW})
"""Of a data set that is there in several, the first."""


def is_dataset_name(text: str) -> bool:
    """Whether `text` is OWNER/NAME or OWNER/NAME@REVISION rather than a file that is there."""
    known = PurePosixPath(text).suffix.lower() in SUFFIXES
    return _NAME.fullmatch(text) is not None and not known and not Path(text).exists()


def chosen_files(names: Iterable[str]) -> list[str]:
    """The files of a repository to train on: of one kind, of the training split, else of no other split."""
    visible = [name for name in names if not any(part[0] in "._" for part in name.split("/"))]
    data = [name for name in visible if PurePosixPath(name).name not in NO_DATA]
    for kind in _KINDS:
        files = sorted(name for name in data if PurePosixPath(name).suffix.lower() in kind)
        if training := [name for name in files if "train" in words_in(name)]:
            return training
        if rest := [name for name in files if not words_in(name) & SPLITS]:
            return rest
    return []


def download(name: str, folder: Path, address: str = "", another: str = "") -> Path:
    """The folder below `folder` with the files of data set `name` (OWNER/NAME[@REVISION]), by commit: a second
    call downloads nothing. The hub is at `address`, else HF_ENDPOINT's; it sees the client's own token only where it
    asks for one and that is meant for it. `another`: how another hub is named, where not in [mirrors] alone."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise DataError(f"{name.strip()!r} is no data set of the Hub; write OWNER/NAME or OWNER/NAME@REVISION")
    repo, revision = match["repo"], match["revision"] or "main"
    where = f"data set {repo} at {revision} cannot be downloaded"
    try:
        hub = hub_of(os.environ | ({"HF_ENDPOINT": address} if address else {}), get_token())
        info = hub.told(lambda token: HfApi(hub.address, token).dataset_info(repo, revision=revision))
        files = chosen_files(file_name(sibling.rfilename) for sibling in info.siblings or ())
        if not files:
            raise DataError(f"data set {repo}: no JSONL, JSON, CSV or Parquet file to train on in it")
        target = folder / repo.replace("/", "--") / commit_id(info.sha)
        for file in files:
            _fetch(hub, repo, file, target)
    except SilentHubError as error:
        raise DataError(f"{where}: {error}; {another or hub.another}") from error
    except HubError as error:
        raise DataError(f"{where}: {error}") from error
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in NO_ENTRY:
            reason = hub.refusal(f"datasets/{repo}", status)
        raise DataError(f"{where} from {hub.address}: {reason}") from error
    return target


def _fetch(hub: Hub, repo: str, file: str, target: Path) -> None:
    from huggingface_hub import HfApi

    hub.asked(
        lambda token: HfApi(hub.address, token).hf_hub_download(
            repo, file, repo_type="dataset", revision=target.name, local_dir=target
        )
    )
