"""Alibaba Cloud ECS as a machine calls it by its role: two actions, signed with what its metadata service gives.

Signature version 1 (HMAC-SHA1 over the sorted parameters, with the role's SecurityToken among them):
https://www.alibabacloud.com/help/en/sdk/product-overview/rpc-mechanism
"""

from __future__ import annotations

import base64
import calendar
import contextlib
import hashlib
import hmac
import http.client
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

VERSION = "2014-05-26"
ANSWER_S = 20.0
TOKEN_HEADER, TOKEN_S = "X-aliyun-ecs-metadata-token", "60"
NEVER = ("", "2099")
"""How an answer begins that says no release time."""
_SECONDS, _MINUTES = "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%MZ"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Credentials go to no proxy."""


class Refused(OSError):
    """The API, or the metadata service, gave no answer that can be used. Its text holds no credentials."""


PLANNED = "spotune:planned"
"""The tag in which the laptop writes when a machine goes by plan."""


@dataclass(frozen=True)
class Machine:
    """Times in seconds since 1970."""

    at: float | None
    """When it is released; None: never."""
    planned: float | None
    """When it is by plan; None where nobody wrote that."""
    address: str
    """Private."""


@dataclass(frozen=True)
class Releases:
    """The cluster's machines by their ids, and what time it is, by the cloud's clock."""

    machines: Mapping[str, Machine]
    now: float


@dataclass(frozen=True)
class Ecs:
    """One region, asked by the role of this machine."""

    endpoint: str
    """https://HOST; plain http on a cloud of this very machine alone."""
    region: str
    role: str
    metadata: str
    """Address of the metadata service."""
    tag: tuple[str, str]
    """What the cluster's machines have."""

    def releases(self) -> Releases:
        """Raises Refused."""
        key, value = self.tag
        answer, now = self._call(
            "DescribeInstances", {"PageSize": "100", "Tag.1.Key": key, "Tag.1.Value": value, "RegionId": self.region}
        )
        try:
            found = answer["Instances"]["Instance"]
            return Releases({str(each["InstanceId"]): _machine(each) for each in found}, now)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise Refused(f"DescribeInstances: the answer cannot be read ({type(error).__name__})") from None

    def release(self, instance_id: str, at: float) -> None:
        """Let a machine go then. Raises Refused."""
        told = {"InstanceId": instance_id, "AutoReleaseTime": _text(at), "RegionId": self.region}
        self._call("ModifyInstanceAutoReleaseTime", told)

    def _call(self, action: str, fields: Mapping[str, str]) -> tuple[dict[str, Any], float]:
        key_id, secret, token = self._credentials()
        parameters = {
            **{"Action": action, "Version": VERSION, "Format": "JSON", **fields},
            **{"AccessKeyId": key_id, "SecurityToken": token, "Timestamp": _text(time.time())},
            **{"SignatureMethod": "HMAC-SHA1", "SignatureVersion": "1.0", "SignatureNonce": uuid.uuid4().hex},
        }
        query = signed_query(parameters, secret)
        text, date = _asked(f"{self.endpoint}/?{query}", action)
        answer = _document(text, action)
        try:
            return answer, parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError):
            return answer, time.time()

    def _credentials(self) -> tuple[str, str, str]:
        """Key id, secret and token of the role; they change every few hours."""
        base, what = f"http://{self.metadata}/latest", "the metadata service"
        token, _ = _asked(f"{base}/api/token", what, "PUT", {f"{TOKEN_HEADER}-ttl-seconds": TOKEN_S})
        text, _ = _asked(f"{base}/meta-data/ram/security-credentials/{self.role}", what, "GET", {TOKEN_HEADER: token})
        found = _document(text, what)
        try:
            return str(found["AccessKeyId"]), str(found["AccessKeySecret"]), str(found["SecurityToken"])
        except KeyError as error:
            raise Refused(f"{what} gave credentials without {error}") from None


def signed_query(parameters: Mapping[str, str], secret: str) -> str:
    """The query string of a GET with its signature. Pure."""
    query = "&".join(f"{_quoted(name)}={_quoted(parameters[name])}" for name in sorted(parameters))
    to_sign = f"GET&%2F&{_quoted(query)}"
    made = base64.b64encode(hmac.new(f"{secret}&".encode(), to_sign.encode(), hashlib.sha1).digest())
    return f"{query}&Signature={_quoted(made.decode())}"


def _quoted(text: str) -> str:
    return quote(text, safe="~")


def _asked(url: str, what: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> tuple[str, str]:
    """An answer's text and its Date. Raises Refused, which never quotes the address: a signature is in it."""
    request = urllib.request.Request(url, method=method, headers=dict(headers or {}))
    try:
        with _DIRECT.open(request, timeout=ANSWER_S) as answer:
            return answer.read(4_000_000).decode("utf-8", "replace"), answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        raise Refused(f"{what}: {_code(error)}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise Refused(f"{what} does not answer: {type(reason).__name__}") from None


def _code(error: urllib.error.HTTPError) -> str:
    """What the API calls its refusal."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return str(json.loads(error.read(100_000))["Code"])[:100]
    return f"HTTP {error.code}"


def _document(text: str, what: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        raise Refused(f"{what}: the answer is no JSON") from None
    if not isinstance(answer, dict):
        raise Refused(f"{what}: the answer is no object")
    return answer


def _machine(shown: Mapping[str, Any]) -> Machine:
    """Of DescribeInstances' answer. Raises LookupError, AttributeError, TypeError, ValueError."""
    tags = {each["TagKey"]: each["TagValue"] for each in (shown.get("Tags") or {}).get("Tag", ())}
    addresses = shown["VpcAttributes"]["PrivateIpAddress"]["IpAddress"]
    planned = None
    with contextlib.suppress(ValueError):  # somebody's own text
        planned = _time(tags.get(PLANNED))
    return Machine(_time(shown.get("AutoReleaseTime")), planned, str(addresses[0]) if addresses else "")


def _time(text: str | None) -> float | None:
    """Answers have no seconds, or have them. Raises ValueError."""
    if not text or text[:4] in NEVER:
        return None
    form = _SECONDS if text.count(":") == 2 else _MINUTES
    return float(calendar.timegm(time.strptime(text, form)))


def _text(at: float) -> str:
    return time.strftime(_SECONDS, time.gmtime(at))
