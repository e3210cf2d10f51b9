"""A data set of the Hub, downloaded once: only its data files, of the training split where it has one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from training.data.sample import DataError
from training.data.splits import SUFFIXES, chosen_files
from training.models.hub import NO_ENTRY, HubError, SilentHubError, commit_id, file_name, hub_of

POINTER = ".hub"
"""Suffix of a run's data file that holds a data set's name instead of records."""
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<part>[^@]+))?(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubDataSet:
    """A data set of the Hub: OWNER/NAME[:PART][@REVISION]."""

    repo: str
    part: str = ""
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> HubDataSet:
        """DataError for what is none."""
        if match := _NAME.fullmatch(text):
            return cls(match["repo"], match["part"] or "", match["revision"] or cls.revision)
        raise DataError(f"{text!r} is no data set of the Hub; write OWNER/NAME[:PART][@REVISION]")

    def __str__(self) -> str:
        part = f":{self.part}" if self.part else ""
        return f"{self.repo}{part}{f'@{self.revision}' if self.revision != HubDataSet.revision else ''}"


def on_hub(text: str) -> HubDataSet | None:
    """The data set that `text` names; None for the name of a file, by its suffix or because it is there."""
    is_file = PurePosixPath(text).suffix.lower() in SUFFIXES or Path(text).exists()
    return None if is_file or not _NAME.fullmatch(text) else HubDataSet.parse(text)


def download(dataset: HubDataSet, folder: Path, address: str = "", another: str = "") -> Path:
    """The folder below `folder` with the files of a data set, by commit: a second call downloads nothing. The hub is at
    `address`, else HF_ENDPOINT's; it sees the client's own token only where it asks for one and that is meant for it.
    `another`: how another hub is named, where not in [mirrors] alone."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    repo, part, revision = dataset.repo, dataset.part, dataset.revision
    where = f"data set {repo} at {revision} cannot be downloaded"
    try:
        hub = hub_of(os.environ | ({"HF_ENDPOINT": address} if address else {}), get_token())
        info = hub.told(lambda token: HfApi(hub.address, token).dataset_info(repo, revision=revision))
        names = [file_name(sibling.rfilename) for sibling in info.siblings or ()]
        configs = info.card_data and info.card_data.get("configs")
        files = chosen_files(names, configs, part, how=f"choose one with {repo}:PART")
        target = folder / f"{repo}:{part}".replace("/", "--") / commit_id(info.sha)

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
