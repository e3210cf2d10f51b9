"""A data set of the Hub, downloaded once: only its data files, of the training split where it has one."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Literal

from training.data.sample import DataError
from training.data.splits import SUFFIXES, chosen_files
from training.models.hub import NO_ENTRY, HubError, SilentHubError, commit_id, file_name, hub_of

POINTER = ".hub"
"""Suffix of a run's data file that holds a data set's name instead of records."""
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<choice>[^@]+))?(@(?P<revision>[\w./-]+))?")


def is_dataset_name(text: str) -> bool:
    """Whether `text` is OWNER/NAME, with :PART or @REVISION behind it or not, rather than a file that is there."""
    known = PurePosixPath(text).suffix.lower() in SUFFIXES
    return _NAME.fullmatch(text) is not None and not known and not Path(text).exists()


def download(name: str, folder: Path, address: str = "", another: str = "") -> Path:
    """The folder below `folder` with the files of data set `name` (OWNER/NAME[:PART][@REVISION]), by commit: a second
    call downloads nothing. The hub is at `address`, else HF_ENDPOINT's; it sees the client's own token only where it
    asks for one and that is meant for it. `another`: how another hub is named, where not in [mirrors] alone."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise DataError(f"{name.strip()!r} is no data set of the Hub; write OWNER/NAME[:PART][@REVISION]")
    repo, choice, revision = match["repo"], match["choice"] or "", match["revision"] or "main"
    where = f"data set {repo} at {revision} cannot be downloaded"
    try:
        hub = hub_of(os.environ | ({"HF_ENDPOINT": address} if address else {}), get_token())
        info = hub.told(lambda token: HfApi(hub.address, token).dataset_info(repo, revision=revision))
        names = [file_name(sibling.rfilename) for sibling in info.siblings or ()]
        configs = info.card_data and info.card_data.get("configs")
        files = chosen_files(names, configs, choice, how=f"choose one with {repo}:PART")
        target = folder / f"{repo}:{choice}".replace("/", "--") / commit_id(info.sha)

        def fetch(token: str | Literal[False]) -> None:
            api = HfApi(hub.address, token)
            for file in files:
                api.hf_hub_download(repo, file, repo_type="dataset", revision=target.name, local_dir=target)

        hub.asked(fetch)
    except DataError as error:
        raise DataError(f"data set {repo}: {error}") from error
    except HubError as error:
        cure = f"; {another or hub.another}" if isinstance(error, SilentHubError) else ""
        raise DataError(f"{where}: {error}{cure}") from error
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in NO_ENTRY:
            reason = hub.refusal(f"datasets/{repo}", status)
        raise DataError(f"{where} from {hub.address}: {reason}") from error
    return target
