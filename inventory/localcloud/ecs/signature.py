"""Checks who signed a call, by the vendor's signature V3 (ACS3-HMAC-SHA256, in headers), which its typed SDK sends.

Pure: the clock and the keys come in.
https://www.alibabacloud.com/help/en/sdk/product-overview/v3-request-structure-and-signature
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

from inventory.localcloud.ecs.actions import ApiError

V3 = "ACS3-HMAC-SHA256"
VALID_S = 15 * 60
"""How old a signed call may be, and how long a nonce is remembered."""
_MUST_SIGN = frozenset({"host", "x-acs-action", "x-acs-version", "x-acs-date", "x-acs-signature-nonce"})
_AUTHORIZATION = re.compile(rf"{V3} Credential=([^,]+),\s*SignedHeaders=([^,]+),\s*Signature=([0-9a-f]+)")


@dataclass(frozen=True)
class Request:
    """An HTTP request as far as it is signed. Header names are in small letters, query and form are decoded."""

    method: str
    headers: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    path: str = "/"


@dataclass(frozen=True)
class SignedCaller:
    """What a checked request says of itself."""

    action: str
    version: str
    access_key_id: str
    nonce: str


def verified(request: Request, secrets: Mapping[str, str], now: float) -> SignedCaller:
    """The caller of a rightly signed request. `secrets` is access key id -> secret, `now` in seconds since 1970.

    Raises ApiError with the documented codes. Whether the nonce was used before is the server's to remember.
    """
    headers = request.headers
    match = _AUTHORIZATION.fullmatch(headers.get("authorization", "").strip())
    if not match:
        raise _incomplete()
    key_id, names, signature = match.groups()
    signed = names.split(";")
    if not set(signed) >= _MUST_SIGN or any(name not in headers for name in signed):
        raise _incomplete()
    secret = _secret(secrets, key_id)
    digest = hashlib.sha256(request.body).hexdigest()
    right = v3_signature(request, {name: headers[name] for name in signed}, digest, secret)
    body_told = headers.get("x-acs-content-sha256", digest)
    if not hmac.compare_digest(right, signature) or not hmac.compare_digest(digest, body_told):
        raise ApiError(400, "SignatureDoesNotMatch", "Specified signature does not match our calculation.")
    if not _is_recent(headers["x-acs-date"], now):
        raise ApiError(400, "InvalidTimeStamp.Expired", "Specified time stamp or date value is expired.")
    return SignedCaller(headers["x-acs-action"], headers["x-acs-version"], key_id, headers["x-acs-signature-nonce"])


def v3_signature(request: Request, headers: Mapping[str, str], digest: str, secret: str) -> str:
    """The hexadecimal signature of a request over these of its headers; `digest` is the body's SHA-256."""
    names = sorted(headers)
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in names)
    head = f"{request.method}\n{request.path}\n{_query_text(request.query)}"
    canonical = f"{head}\n{lines}\n{';'.join(names)}\n{digest}"
    to_sign = f"{V3}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    return hmac.new(secret.encode(), to_sign.encode(), hashlib.sha256).hexdigest()


def _is_recent(text: str, now: float) -> bool:
    try:
        at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return False
    return abs(now - at) <= VALID_S


def _secret(secrets: Mapping[str, str], key_id: str) -> str:
    if key_id not in secrets:
        raise ApiError(404, "InvalidAccessKeyId.NotFound", "Specified access key is not found.")
    return secrets[key_id]


def _incomplete() -> ApiError:
    return ApiError(400, "IncompleteSignature", "The request signature does not conform to Aliyun standards.")


def _query_text(query: Mapping[str, str]) -> str:
    return "&".join(f"{_quoted(name)}={_quoted(query[name])}" for name in sorted(query))


def _quoted(text: str) -> str:
    """RFC 3986"""
    return quote(text, safe="~")
