"""Alibaba Cloud ECS by the vendor's SDK.

Requests and answers are plain dicts, as they go over the wire; a field's name is held against the vendor's description
by the local cloud. The SDK repeats nothing by itself and adds no ClientToken: both are ours (`cloud.pace`,
`renting.intents`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from inventory import local_address
from inventory.aliyun_ecs.caller import NOT_SERVED, Endpoint
from inventory.aliyun_ecs.disks import Disks
from inventory.aliyun_ecs.errors import classify, no_answer, sentence, setting_of
from inventory.aliyun_ecs.machines import Assistant
from inventory.aliyun_ecs.place import PreparedPlaces
from inventory.aliyun_ecs.recording import VARIABLE, Recording
from inventory.cloud.errors import CloudError, NoCloud, RentError
from inventory.cloud.pace import CallPace
from inventory.cloud.port import Ability, Deletable
from inventory.settings import Settings

NO_SDK = "renting on Alibaba Cloud needs the vendor's SDK, which is not installed: pip install -e '.[aliyun]'"


def endpoint(settings: Settings) -> Endpoint:
    """Where the cluster's cloud answers. Raises NoCloud where the local cloud is asked for and does not run."""
    url = settings.aliyun.endpoint
    if not settings.aliyun.is_local:
        parts = urlsplit(url)
        return Endpoint(parts.netloc, parts.scheme or "https")
    if server := local_address.served(settings.name):
        return Endpoint(server.host, "http", server.credentials)
    others = local_address.all_served()
    if not others:
        raise NoCloud(NOT_SERVED)
    raise NoCloud(
        f"the local cloud that runs is of the cluster {' and '.join(map(repr, others))}; start one for "
        f"{settings.name!r}: fab local.serve"
    )


class Ecs(PreparedPlaces, Assistant, Disks):
    """One region of the cloud: what each method answers says the port (inventory/cloud/port.py)."""

    abilities = frozenset(Ability)

    def __init__(self, region_id: str, where: Endpoint, pace: CallPace, recording: Recording | None) -> None:
        """`open` is the way in. Raises RentError: no SDK, no credentials."""
        self.region_id = region_id
        self.pace = pace
        self.permitted, self.made, self.unlisted, self.ahead, self.ready = set(), {}, set(), timedelta(0), {}
        self._where = where
        self._recording = recording
        try:
            from inventory.aliyun_ecs.sdk import Sdk  # slow, and an extra: only for who asks this cloud
        except ImportError:
            raise RentError(NO_SDK) from None
        self._sdk = Sdk(region_id, where, pace)

    @classmethod
    def open(cls, settings: Settings, record: Path | None = None, pace: CallPace | None = None) -> Ecs:
        """The cluster's region. Raises RentError with what is missing: SDK, credentials, the local cloud.

        `record`, or $SPOTUNE_ECS_RECORD: a folder for scrubbed answers.
        """
        folder = record or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
        state = local_address.clouds().parent
        recording = Recording(folder, state) if folder else None
        if pace is None:
            pace = CallPace.of_local_cloud(settings.local.wait_factor) if settings.aliyun.is_local else CallPace()
        return cls(settings.aliyun.region, endpoint(settings), pace, recording)

    def in_region(self, region_id: str) -> Ecs:
        if self._where.host and not self._where.credentials:
            raise RentError(f"endpoint in cluster.toml is of one region: {region_id} cannot be asked")
        return Ecs(region_id, self._where, self.pace, None)

    def delete(self, kind: Deletable, ids: Sequence[str], token: str = "") -> None:
        if kind == "instance":
            self.delete_instances(ids, token)
            return
        remove = {"disk": self.delete_disk, "snapshot": self.delete_snapshot, "key pair": self.delete_key_pair}[kind]
        for each in ids:
            remove(each)

    def once(self, action: str, fields: Mapping[str, Any], version: str) -> dict[str, Any]:
        """One request, signed and sent by the SDK, and its answer as it came."""
        try:
            response = self._sdk.send(action, fields, version)
            answer = response["body"]
        except Exception as error:
            raise self._refusal(action, error) from None  # theirs quotes the request
        self.hear_time(next((text for name, text in response["headers"].items() if name.lower() == "date"), ""))
        if not isinstance(answer, dict):
            raise self._refusal(action, ValueError("the answer is JSON but no object"))
        self._record(action, answer)
        return answer

    def _refusal(self, action: str, error: Exception) -> CloudError:
        code, data = getattr(error, "code", None), getattr(error, "data", None)
        if not isinstance(data, dict):
            host = self._where.host or f"the endpoint of {self.region_id}"
            kind, words = no_answer(action, str(error), host, self.pace.read_s)
            return CloudError(words, kind)
        self._record(action, {key: value for key, value in data.items() if key != "statusCode"})
        message, request_id = str(data.get("Message") or ""), str(data.get("RequestId") or "")
        status = getattr(error, "status_code", None)
        code = "" if code in (None, "None") else str(code)
        kind = classify(code, status, message)
        after_s = (getattr(error, "retry_after", None) or 0) / 1000  # the header counts milliseconds
        words = sentence(action, code or f"HTTP {status}", message, kind, request_id)
        return CloudError(words, kind, code, request_id, retry_after_s=after_s, setting=setting_of(code))

    def _record(self, action: str, answer: Mapping[str, Any]) -> None:
        if self._recording:
            self._recording.keep(action, answer)
