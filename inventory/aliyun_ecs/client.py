"""Alibaba Cloud ECS by the vendor's SDK: the only module that touches it.

Requests go through the SDK's own models, so that a misspelt field is an error here and not silently dropped there;
answers are taken as the plain dicts that came over the wire. The SDK repeats nothing by itself and adds no
ClientToken: both are ours (`cloud.pace`, `renting.intents`).
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from inventory.aliyun_ecs.caller import ECS, STS, VPC
from inventory.aliyun_ecs.disks import Disks
from inventory.aliyun_ecs.errors import classify, no_answer, sentence, setting_of
from inventory.aliyun_ecs.fields import lost
from inventory.aliyun_ecs.host_keys import Assistant
from inventory.aliyun_ecs.machines import Machines
from inventory.aliyun_ecs.network import Networks
from inventory.aliyun_ecs.offers import Offers
from inventory.aliyun_ecs.recording import VARIABLE, Recording
from inventory.cloud.errors import CloudError, Kind, NoCloud, RentError
from inventory.cloud.pace import CallPace
from inventory.cloud.port import Ability
from inventory.localcloud.places import Places
from inventory.settings import Settings

NO_SDK = "renting on Alibaba Cloud needs the vendor's SDK, which is not installed: pip install -e '.[aliyun]'"
NO_CREDENTIALS = (
    "no credentials for Alibaba Cloud were found: set ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET, "
    "or write them to ~/.alibabacloud/credentials.ini (or `aliyun configure`)"
)
NOT_SERVED = "the local cloud does not run: fab local.serve"
CENTRAL_VPC = "vpc.aliyuncs.com"
WITH_CENTRAL_VPC = re.compile(
    "cn-(qingdao|beijing|hangzhou|shanghai|shenzhen|hongkong)|ap-southeast-1|us-(east|west)-1"
)
"""Regions whose networks are asked for at the central address (the vendor's endpoint table of 2016-04-28)."""
LARGE_FIELD = "CommandContent"


@dataclass(frozen=True)
class Endpoint:
    """Where the API is, and whose credentials it takes."""

    host: str
    """With the port; empty: the region's own."""
    protocol: str = "https"
    credentials: Path | None = None
    """The local cloud's; None: the SDK's chain."""

    @property
    def is_loopback(self) -> bool:
        return (urlsplit(f"//{self.host}").hostname or "") in ("127.0.0.1", "localhost", "::1")


def endpoint(settings: Settings) -> Endpoint:
    """Where the cluster's cloud answers. Raises NoCloud where the local cloud is asked for and does not run."""
    given = settings.aliyun.endpoint
    if not settings.aliyun.is_local:
        parts = urlsplit(given)
        return Endpoint(parts.netloc, parts.scheme or "https")
    folder = Places.of(settings.name).folder
    if host := _served(folder):
        return Endpoint(host.removeprefix("http://"), "http", folder / "credentials.ini")
    others = [each.parent.name for each in sorted(folder.parent.glob("*/api.json")) if _served(each.parent)]
    if not others:
        raise NoCloud(NOT_SERVED)
    raise NoCloud(
        f"the local cloud that runs is of the cluster {' and '.join(map(repr, others))}, and cluster.toml says name = "
        f'"{settings.name}": write that name, or start another local cloud: fab local.serve'
    )


def _served(folder: Path) -> str | None:
    """Where the local cloud of this folder answers; None where it does not run."""
    try:
        told = json.loads((folder / "api.json").read_text(encoding="utf-8"))
        with suppress(PermissionError):  # somebody else's process, but there
            os.kill(int(told["pid"]), 0)
        return str(told["endpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Ecs(Machines, Assistant, Disks, Offers, Networks):
    """One region of the cloud: what each method answers says the port (inventory/cloud/port.py)."""

    abilities = frozenset(Ability)

    def __init__(self, region_id: str, where: Endpoint, pace: CallPace, recording: Recording | None) -> None:
        """`open` is the way in. Raises RentError: no SDK, no credentials."""
        self.region_id = region_id
        self.pace = pace
        self.permitted, self.made, self.unlisted, self.ahead = set(), {}, set(), timedelta(0)
        self._where = where
        self._recording = recording
        credential = _credential(where)
        try:
            from alibabacloud_ecs20140526 import models
            from alibabacloud_ecs20140526.client import Client
            from alibabacloud_tea_openapi.client import Client as PlainClient
        except ImportError:
            raise RentError(NO_SDK) from None
        logging.getLogger("darabonba-core").disabled = True  # with DEBUG=sdk it prints headers, tokens among them
        if where.is_loopback:
            _bypass_proxies(where)
        self._models = models
        central = CENTRAL_VPC if WITH_CENTRAL_VPC.fullmatch(region_id) else f"vpc.{region_id}.aliyuncs.com"
        self._clients = {
            ECS: Client(_config(region_id, where, where.host, pace, credential)),
            VPC: PlainClient(_config(region_id, where, where.host or central, pace, credential)),
            STS: PlainClient(
                _config(region_id, where, where.host or f"sts.{region_id}.aliyuncs.com", pace, credential)
            ),
        }

    @classmethod
    def open(cls, settings: Settings, record: Path | None = None, pace: CallPace | None = None) -> Ecs:
        """The cluster's region. Raises RentError with what is missing: SDK, credentials, the local cloud.

        `record`, or $SPOTUNE_ECS_RECORD: a folder for scrubbed answers.
        """
        folder = record or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
        state = Places.of(settings.name).folder.parent.parent
        recording = Recording(folder, state) if folder else None
        if pace is None:
            pace = CallPace.of_local_cloud(settings.local.wait_factor) if settings.aliyun.is_local else CallPace()
        return cls(settings.aliyun.region, endpoint(settings), pace, recording)

    def in_region(self, region_id: str) -> Ecs:
        if self._where.host and not self._where.credentials:
            raise RentError(f"endpoint in cluster.toml is of one region: {region_id} cannot be asked")
        return Ecs(region_id, self._where, self.pace, None)

    def once(self, action: str, fields: Mapping[str, Any], version: str) -> dict[str, Any]:
        """One request, signed and sent by the SDK, and its answer as it came."""
        from alibabacloud_tea_openapi.utils import Utils
        from alibabacloud_tea_openapi.utils_models import OpenApiRequest, Params
        from darabonba.runtime import RuntimeOptions

        if version == ECS:
            self._check(action, fields)
        flat = Utils.query(dict(fields))
        # In the body where it is large or somebody's text: URLs are logged on their way.
        request = OpenApiRequest(body=flat) if LARGE_FIELD in fields else OpenApiRequest(query=flat)
        params = Params(
            action=action,
            version=version,
            protocol=self._where.protocol,
            pathname="/",
            method="POST",
            auth_type="AK",
            style="RPC",
            req_body_type="formData",
            body_type="json",
        )
        try:
            response = self._clients[version].call_api(params, request, RuntimeOptions())
            answer = response["body"]
        except Exception as error:
            raise self._refusal(action, error) from None  # theirs quotes the request
        self.hear_time(next((text for name, text in response["headers"].items() if name.lower() == "date"), ""))
        if not isinstance(answer, dict):
            raise self._refusal(action, ValueError("the answer is JSON but no object"))
        self._record(action, answer)
        return answer

    def _check(self, action: str, fields: Mapping[str, Any]) -> None:
        model = getattr(self._models, f"{action}Request")()
        unknown = lost(dict(fields), model.from_map(dict(fields)).to_map())
        if unknown:
            raise CloudError(f"{action}: the installed SDK does not know {', '.join(unknown)}", Kind.INPUT)

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


def _config(region_id: str, where: Endpoint, host: str, pace: CallPace, credential: Any) -> Any:
    from alibabacloud_tea_openapi.utils_models import Config

    return Config(
        credential=credential,
        region_id=region_id,
        endpoint=host or None,
        protocol=where.protocol,
        connect_timeout=round(pace.connect_s * 1000),
        read_timeout=round(pace.read_s * 1000),
        user_agent="spotune",
    )


def _credential(where: Endpoint) -> Any:
    """The SDK's credential client: the local cloud's profile, or whatever the SDK's chain finds."""
    try:
        from alibabacloud_credentials.client import Client
        from alibabacloud_credentials.provider import DefaultCredentialsProvider, ProfileCredentialsProvider
        from alibabacloud_credentials.utils import auth_util
    except ImportError:
        raise RentError(NO_SDK) from None
    if where.credentials:
        provider = ProfileCredentialsProvider(profile_file=str(where.credentials), profile_name="default")
    else:
        # Outside the cloud the chain's last link only waits for an address that nobody has.
        if not os.environ.get("ALIBABA_CLOUD_ECS_METADATA") and "ALIBABA_CLOUD_ECS_METADATA_DISABLED" not in os.environ:
            auth_util.environment_ecs_metadata_disabled = "true"
        provider = DefaultCredentialsProvider()
    credential = Client(provider=provider)
    try:
        credential.get_credential()
    except Exception:
        raise NoCloud(NOT_SERVED if where.credentials else NO_CREDENTIALS) from None
    return credential


def _bypass_proxies(where: Endpoint) -> None:
    """Send to this very machine directly. The SDK takes HTTP_PROXY for every address, whatever NO_PROXY says; it
    keeps one session an address, and that one gets an adapter that knows no proxies.
    """
    from darabonba.core import DEFAULT_POOL_MAXSIZE, DaraCore
    from requests.adapters import HTTPAdapter

    class Direct(HTTPAdapter):
        def send(self, request: Any, *given: Any, **options: Any) -> Any:
            return super().send(request, *given, **{**options, "proxies": None})

    key = f"{where.protocol}://{where.host}:80:pool={DEFAULT_POOL_MAXSIZE}"
    session = DaraCore._get_session(key, where.protocol, pool_size=DEFAULT_POOL_MAXSIZE)
    session.mount(f"{where.protocol}://", Direct())
