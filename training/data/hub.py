"""A data set of the Hub, downloaded once: only its data files, of the training split where it has one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from training.data.readers import JSON_LINES, PARQUET
from training.data.sample import DataError

POINTER = ".hub"
"""Suffix of a run's data file that holds a data set's name instead of records."""
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_KINDS = ({PARQUET}, JSON_LINES, {".json"})
"""Of a data set that is there in several, the first."""
_OTHER_SPLITS = {"test", "tests", "validation", "valid", "val", "dev", "eval", "evaluation"}
_NO_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}


def is_dataset_name(text: str) -> bool:
    """Whether `text` is OWNER/NAME or OWNER/NAME@REVISION rather than a file that is there."""
    suffix = PurePosixPath(text).suffix.lower()
    known = suffix in JSON_LINES | {PARQUET, ".json"}
    return _NAME.fullmatch(text) is not None and not known and not Path(text).exists()


def chosen_files(names: Iterable[str]) -> list[str]:
    """The files of a repository to train on: of one kind, of the training split, else of no other split."""
    visible = [name for name in names if not any(part[0] in "._" for part in name.split("/"))]
    data = [name for name in visible if PurePosixPath(name).name not in _NO_DATA]
    for kind in _KINDS:
        files = sorted(name for name in data if PurePosixPath(name).suffix.lower() in kind)
        if training := [name for name in files if "train" in _words(name)]:
            return training
        if rest := [name for name in files if not _words(name) & _OTHER_SPLITS]:
            return rest
    return []


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def download(name: str, folder: Path) -> Path:
    """The folder below `folder` with the files of data set `name` (OWNER/NAME[@REVISION]), by commit: a second
    call downloads nothing. The endpoint is HF_ENDPOINT's, the token the Hub client's own."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise DataError(f"{name.strip()!r} is no data set of the Hub; write OWNER/NAME or OWNER/NAME@REVISION")
    repo, revision = match["repo"], match["revision"] or "main"
    api = HfApi()
    try:
        info = api.dataset_info(repo, revision=revision)
        files = chosen_files(sibling.rfilename for sibling in info.siblings or ())
        if not files:
            raise DataError(f"data set {repo}: no JSONL, JSON or Parquet file to train on in it")
        target = folder / repo.replace("/", "--") / str(info.sha)
        for file in files:
            api.hf_hub_download(repo, file, repo_type="dataset", revision=info.sha, local_dir=target)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise DataError(f"data set {repo} at {revision} cannot be downloaded from {api.endpoint}: {reason}") from error
    return target
