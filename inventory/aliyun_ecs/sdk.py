"""The vendor's SDK: the only module that touches it. An action is called by its name, without the package of ECS: to
import its models takes a fifth of a second."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from alibabacloud_credentials.client import Client as CredentialClient
from alibabacloud_credentials.provider import (
    CLIProfileCredentialsProvider,
    EcsRamRoleCredentialsProvider,
    EnvironmentVariableCredentialsProvider,
    OIDCRoleArnCredentialsProvider,
    ProfileCredentialsProvider,
    URLCredentialsProvider,
)
from alibabacloud_credentials.utils import auth_constant
from alibabacloud_tea_openapi.client import Client
from alibabacloud_tea_openapi.utils import Utils
from alibabacloud_tea_openapi.utils_models import Config, OpenApiRequest, Params
from darabonba.core import DEFAULT_POOL_MAXSIZE, DaraCore
from darabonba.runtime import RuntimeOptions
from requests.adapters import HTTPAdapter

from inventory.aliyun_ecs.caller import ECS, NOT_SERVED, STS, VPC, Endpoint
from inventory.cloud.errors import NoCloud
from inventory.cloud.pace import CallPace
from training.text import internet

NO_CREDENTIALS = (
    "no credentials for Alibaba Cloud were found: set ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET, "
    "or write them to ~/.alibabacloud/credentials.ini (or `aliyun configure`)"
)
BY_VARIABLES: Mapping[tuple[str, ...], Callable[[], Any]] = {
    ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET"): EnvironmentVariableCredentialsProvider,
    (
        "ALIBABA_CLOUD_OIDC_TOKEN_FILE",
        "ALIBABA_CLOUD_OIDC_PROVIDER_ARN",
        "ALIBABA_CLOUD_ROLE_ARN",
    ): OIDCRoleArnCredentialsProvider,
}
"""Variables that count together; one of the first two alone is a mistake."""
BY_VARIABLE: Mapping[str, Callable[[], Any]] = {
    "ALIBABA_CLOUD_CREDENTIALS_FILE": ProfileCredentialsProvider,
    "ALIBABA_CLOUD_ECS_METADATA": EcsRamRoleCredentialsProvider,
    "ALIBABA_CLOUD_CREDENTIALS_URI": URLCredentialsProvider,
}
HOME = Path(auth_constant.HOME)
ADDRESS = re.compile(r"with url: \S+ ?")
"""What errors quote of a signed request."""
_OF_HANGZHOU = ("cn-hangzhou", "cn-shanghai-finance-1", "cn-shenzhen-finance-1")
_OF_NONE = ("cn-hangzhou-finance", "cn-north-2-gov-1", "cn-beijing-gov-1", "cn-wuhan")
ELSEWHERE = {
    ECS: dict.fromkeys(_OF_HANGZHOU, "ecs-cn-hangzhou.aliyuncs.com") | dict.fromkeys(_OF_NONE, "ecs.aliyuncs.com"),
    VPC: dict.fromkeys(_OF_HANGZHOU + _OF_NONE, "vpc.aliyuncs.com"),
}
"""Regions that answer at another address than PRODUCT.REGION.aliyuncs.com, as in the vendor's clients of ECS (7.11) and
of VPC (7.2)."""
PRODUCTS = {ECS: "ecs", VPC: "vpc", STS: "sts"}
LARGE_FIELD = "CommandContent"


class Sdk:
    """The SDK's clients of one region. Raises NoCloud where there are no credentials."""

    def __init__(self, region_id: str, where: Endpoint, pace: CallPace) -> None:
        hosts = {version: where.host or host_of(version, region_id) for version in PRODUCTS}
        proxy, certificates = _way_out(where, hosts[ECS])
        credential = _credential(where)
        logging.getLogger("darabonba-core").disabled = True  # with DEBUG=sdk it prints headers, tokens among them
        self._protocol = where.protocol
        self._clients = {
            version: Client(
                Config(
                    credential=credential,
                    region_id=region_id,
                    endpoint=host,
                    protocol=where.protocol,
                    connect_timeout=round(pace.connect_s * 1000),
                    read_timeout=round(pace.read_s * 1000),
                    user_agent="spotune",
                    https_proxy=proxy or None,
                    ca=certificates or None,
                )
            )
            for version, host in hosts.items()
        }
        for client in self._clients.values():
            if where.is_loopback or internet.is_direct(client._endpoint):
                _bypass_proxies(where.protocol, client._endpoint)

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


def host_of(version: str, region_id: str) -> str:
    """Where a product answers for a region."""
    return ELSEWHERE.get(version, {}).get(region_id, f"{PRODUCTS[version]}.{region_id}.aliyuncs.com")


def _way_out(where: Endpoint, host: str) -> tuple[str, str]:
    """The proxy and the certificates of this machine's environment, empty where it names none. Raises NoCloud."""
    try:
        proxy = "" if where.is_loopback else internet.proxy(host)
        return proxy, internet.ca_bundle() if where.protocol == "https" else ""
    except internet.InternetError as error:
        raise NoCloud(str(error)) from None


def _credential(where: Endpoint) -> Any:
    """The SDK's credential client of where credentials are set up. Raises NoCloud: nowhere, or they do not work."""
    logging.getLogger("credentials").disabled = True  # its tracebacks quote signed addresses
    source, provider = _source(where)
    try:
        credential = CredentialClient(provider=provider())
        credential.get_credential()
    except Exception as error:
        reason = " ".join(ADDRESS.sub("", str(error)).split())[:300]
        why = NOT_SERVED if where.credentials else f"the credentials of {source} do not work: {reason}"
        raise NoCloud(why) from None
    return credential


def _source(where: Endpoint) -> tuple[str, Callable[[], Any]]:
    """The first place, in the SDK's order, where credentials are set up. The SDK's own chain goes on to the next one
    where these are incomplete or fail, and that may be another account's. Raises NoCloud."""
    if where.credentials:
        local = partial(ProfileCredentialsProvider, profile_file=str(where.credentials), profile_name="default")
        return str(where.credentials), local
    for names, provider in BY_VARIABLES.items():
        missing = [name for name in names if not os.environ.get(name)]
        if not missing:
            return names[0], provider
        if present := [name for name in names[:2] if name not in missing]:
            raise NoCloud(f"{present[0]} is set, but not {', '.join(missing)}: set all of them, or none")
    profile, credentials = HOME / ".aliyun/config.json", HOME / ".alibabacloud/credentials.ini"
    has_profile = profile.is_file() or os.environ.get("ALIBABA_CLOUD_PROFILE")
    if has_profile and os.environ.get("ALIBABA_CLOUD_CLI_PROFILE_DISABLED", "").lower() != "true":
        return str(profile), CLIProfileCredentialsProvider
    if credentials.is_file() and not os.environ.get("ALIBABA_CLOUD_CREDENTIALS_FILE"):
        return str(credentials), ProfileCredentialsProvider
    for name, provider in BY_VARIABLE.items():
        if os.environ.get(name):
            return name, provider
    raise NoCloud(NO_CREDENTIALS)


def _bypass_proxies(protocol: str, host: str) -> None:
    """Send to a host directly. The SDK takes HTTPS_PROXY for every address, whatever NO_PROXY says; it keeps one
    session an address, and that one gets an adapter that knows no proxies.
    """

    class Direct(HTTPAdapter):
        def send(self, request: Any, *arguments: Any, **options: Any) -> Any:
            return super().send(request, *arguments, **{**options, "proxies": None})

    key = f"{protocol}://{host}:80:pool={DEFAULT_POOL_MAXSIZE}"
    session = DaraCore._get_session(key, protocol, pool_size=DEFAULT_POOL_MAXSIZE)
    session.mount(f"{protocol}://", Direct())
