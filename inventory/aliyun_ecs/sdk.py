"""The vendor's SDK: the only module that touches it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from alibabacloud_credentials.client import Client as CredentialClient
from alibabacloud_credentials.provider import DefaultCredentialsProvider, ProfileCredentialsProvider
from alibabacloud_credentials.utils import auth_util
from alibabacloud_ecs20140526 import models
from alibabacloud_ecs20140526.client import Client
from alibabacloud_tea_openapi.client import Client as PlainClient
from alibabacloud_tea_openapi.utils import Utils
from alibabacloud_tea_openapi.utils_models import Config, OpenApiRequest, Params
from darabonba.core import DEFAULT_POOL_MAXSIZE, DaraCore
from darabonba.runtime import RuntimeOptions
from requests.adapters import HTTPAdapter

from inventory.aliyun_ecs.caller import ECS, NOT_SERVED, STS, VPC, Endpoint
from inventory.cloud.errors import NoCloud
from inventory.cloud.pace import CallPace

NO_CREDENTIALS = (
    "no credentials for Alibaba Cloud were found: set ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET, "
    "or write them to ~/.alibabacloud/credentials.ini (or `aliyun configure`)"
)
CENTRAL_VPC = "vpc.aliyuncs.com"
WITH_CENTRAL_VPC = re.compile(
    "cn-(qingdao|beijing|hangzhou|shanghai|shenzhen|hongkong)|ap-southeast-1|us-(east|west)-1"
)
"""Regions whose networks are asked for at the central address (the vendor's endpoint table of 2016-04-28)."""
LARGE_FIELD = "CommandContent"
LARGE_FIELD = "CommandContent"


class Sdk:
    """The SDK's clients of one region. Raises NoCloud where there are no credentials."""

    def __init__(self, region_id: str, where: Endpoint, pace: CallPace) -> None:
        credential = _credential(where)
        logging.getLogger("darabonba-core").disabled = True  # with DEBUG=sdk it prints headers, tokens among them
        if where.is_loopback:
            _bypass_proxies(where)
        central = CENTRAL_VPC if WITH_CENTRAL_VPC.fullmatch(region_id) else f"vpc.{region_id}.aliyuncs.com"
        hosts = {ECS: where.host, VPC: where.host or central, STS: where.host or f"sts.{region_id}.aliyuncs.com"}
        self._protocol = where.protocol
        self._clients = {
            version: (Client if version == ECS else PlainClient)(
                Config(
                    credential=credential,
                    region_id=region_id,
                    endpoint=host or None,
                    protocol=where.protocol,
                    connect_timeout=round(pace.connect_s * 1000),
                    read_timeout=round(pace.read_s * 1000),
                    user_agent="spotune",
                )
            )
            for version, host in hosts.items()
        }

    def send(self, action: str, fields: Mapping[str, Any], version: str) -> dict[str, Any]:
        """One request, signed and sent; headers and body of its answer. Raises what the SDK raises."""
        flat = Utils.query(dict(fields))
        # In the body where it is large or somebody's text: URLs are logged on their way.
        request = OpenApiRequest(body=flat) if LARGE_FIELD in fields else OpenApiRequest(query=flat)
        params = Params(
            action=action,
            version=version,
            protocol=self._protocol,
            pathname="/",
            method="POST",
            auth_type="AK",
            style="RPC",
            req_body_type="formData",
            body_type="json",
        )
        return dict(self._clients[version].call_api(params, request, RuntimeOptions()))

    def known_fields(self, action: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What the SDK's own model of a request keeps of its fields."""
        return dict(getattr(models, f"{action}Request")().from_map(dict(fields)).to_map())


def _credential(where: Endpoint) -> Any:
    """The SDK's credential client: the local cloud's profile, or whatever the SDK's chain finds."""
    if where.credentials:
        provider = ProfileCredentialsProvider(profile_file=str(where.credentials), profile_name="default")
    else:
        # Outside the cloud the chain's last link only waits for an address that nobody has.
        if not os.environ.get("ALIBABA_CLOUD_ECS_METADATA") and "ALIBABA_CLOUD_ECS_METADATA_DISABLED" not in os.environ:
            auth_util.environment_ecs_metadata_disabled = "true"
        provider = DefaultCredentialsProvider()
    credential = CredentialClient(provider=provider)
    try:
        credential.get_credential()
    except Exception:
        raise NoCloud(NOT_SERVED if where.credentials else NO_CREDENTIALS) from None
    return credential


def _bypass_proxies(where: Endpoint) -> None:
    """Send to this very machine directly. The SDK takes HTTP_PROXY for every address, whatever NO_PROXY says; it
    keeps one session an address, and that one gets an adapter that knows no proxies.
    """

    class Direct(HTTPAdapter):
        def send(self, request: Any, *arguments: Any, **options: Any) -> Any:
            return super().send(request, *arguments, **{**options, "proxies": None})

    key = f"{where.protocol}://{where.host}:80:pool={DEFAULT_POOL_MAXSIZE}"
    session = DaraCore._get_session(key, where.protocol, pool_size=DEFAULT_POOL_MAXSIZE)
    session.mount(f"{where.protocol}://", Direct())
