"""ModelScope as a place to publish, by its own SDK where that is installed.

Written from the SDK's documentation; it has never been run against ModelScope.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from training.errors import AdapterError
from training.laptop.adapter.publish import Parcel, Present

T = TypeVar("T")
PRIVATE, PUBLIC = 1, 5
"""ModelScope's own numbers for who may read a model."""


class ModelScope:
    """modelscope.cn."""

    def __init__(self) -> None:
        try:
            from modelscope.hub.api import HubApi
        except ImportError:
            raise AdapterError("publishing to ModelScope needs its SDK: pip install modelscope") from None
        self._token = os.environ.get("MODELSCOPE_API_TOKEN", "")
        if not self._token:
            raise AdapterError("no token for ModelScope: set MODELSCOPE_API_TOKEN")
        self._api: Any = HubApi()
        self._asked(lambda: self._api.login(self._token))

    def _asked(self, ask: Callable[[], T]) -> T:
        """The SDK's answer; its errors, of whatever kind, as one sentence without the token."""
        try:
            return ask()
        except AdapterError:
            raise
        except Exception as error:  # of the SDK, of requests, of the service's answer not being as expected
            words = " ".join(str(error).split()).replace(self._token, "(token)")
            raise AdapterError(f"ModelScope refused: {type(error).__name__}: {words[:300]}") from None

    def present(self, repo: str) -> Present | None:
        """What the repository is now."""
        return self._asked(lambda: self._present(repo))

    def _present(self, repo: str) -> Present | None:
        if not self._api.repo_exists(repo, token=self._token):
            return None
        files = self._api.get_model_files(repo, recursive=True)
        visibility = self._api.get_model(repo).get("Visibility", PUBLIC)
        return Present(visibility != PUBLIC, {f["Path"]: f.get("Sha256", "") for f in files if f["Type"] == "blob"})

    def upload(self, parcel: Parcel, message: str) -> None:
        """Create and fill the repository."""
        self._asked(lambda: self._upload(parcel, message))

    def _upload(self, parcel: Parcel, message: str) -> None:
        visibility = PRIVATE if parcel.private else PUBLIC
        self._api.create_repo(parcel.repo, visibility=visibility, exist_ok=True, token=self._token)
        with tempfile.TemporaryDirectory() as folder:
            for name, content in parcel.files.items():
                place = Path(folder) / name
                place.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, bytes):
                    place.write_bytes(content)
                else:
                    place.symlink_to(content.resolve())
            self._api.upload_folder(repo_id=parcel.repo, folder_path=folder, commit_message=message, token=self._token)

    def address(self, repo: str) -> str:
        """Where to look at it."""
        return f"https://modelscope.cn/models/{repo}"
