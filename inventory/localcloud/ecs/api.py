"""From an HTTP request to its answer: who signed it, whether he may, what became of it.

Whether a call is one that the vendor describes: no parameter that its action does not know, none of another type,
none missing that must be there.

parameters.json has a line for each action that is served, made of the vendor's description of the API: `Amount:i` is a
whole number (f: a decimal, b: a truth value), `RegionId!` must be there, `DataDisk.N.Size` is of each of a list, and
`Permissions.N.*` is not described further.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web

from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters
from inventory.localcloud.ecs.dispatch import Dispatcher, FaultFile, NoAnswerError

FILE = Path(__file__).with_name("parameters.json")
WORD = re.compile(r"(?P<name>[\w.*]+)(?P<needed>!?)(:(?P<kind>[ifb]))?")
TRUTH = ("true", "false")
REGION = "RegionId"
"""The vendor's clients send it with every call."""


def _truth(value: str) -> None:
    if value.lower() not in TRUTH:
        raise ValueError(value)


READ: Mapping[str, Callable[[str], Any]] = {"i": int, "f": float, "b": _truth}


@dataclass(frozen=True)
class Described:
    """The parameters of an action: their kinds, and which must be there."""

    kinds: Mapping[str, str]
    needed: tuple[str, ...]


@cache
def described() -> dict[str, dict[str, Described]]:
    """By version and action."""
    descriptions = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        version: {name: _described(line) for name, line in actions.items()} for version, actions in descriptions.items()
    }


def _described(line: str) -> Described:
    words = [match for word in line.split() if (match := WORD.fullmatch(word))]
    return Described(
        {word["name"]: word["kind"] or "" for word in words}, tuple(word["name"] for word in words if word["needed"])
    )


def check(version: str, action: str, flat: Mapping[str, str]) -> None:
    """Raises the API's refusal of a call that is not as its action is described; an unknown action is not looked at."""
    if (known := described().get(version, {}).get(action)) is None:
        return
    general = {key: re.sub(r"\.\d+(?=\.|$)", ".N", key) for key in flat}
    for key, name in general.items():
        if key == REGION:
            continue
        kind = known.kinds.get(key, known.kinds.get(name))
        if kind is None and f"{name.rpartition('.')[0]}.*" not in known.kinds:
            raise ApiError(400, "UnsupportedParameter", f"{action} knows no parameter {key}.")
        Parameters(flat).read(key, READ.get(kind or "", str), "")
    for name in known.needed:
        listed, _, part = name.partition(".N.")  # of each of a list: where there is one
        entries = {key.rpartition(".")[0] for key in flat if part and key.startswith(f"{listed}.")}
        missing = any(f"{entry}.{part}" not in flat for entry in entries) if part else name not in general.values()
        if missing:
            message = f"The input parameter {name} that is mandatory for processing this request is not supplied."
            raise ApiError(400, f"MissingParameter.{name}", message)


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
    if key_id not in secrets:
        raise ApiError(404, "InvalidAccessKeyId.NotFound", "Specified access key is not found.")
    digest = hashlib.sha256(request.body).hexdigest()
    right = v3_signature(request, {name: headers[name] for name in signed}, digest, secrets[key_id])
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
    query = "&".join(f"{_quoted(name)}={_quoted(request.query[name])}" for name in sorted(request.query))
    head = f"{request.method}\n{request.path}\n{query}"
    canonical = f"{head}\n{lines}\n{';'.join(names)}\n{digest}"
    to_sign = f"{V3}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    return hmac.new(secret.encode(), to_sign.encode(), hashlib.sha256).hexdigest()


def _is_recent(text: str, now: float) -> bool:
    try:
        at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return False
    return abs(now - at) <= VALID_S


def _incomplete() -> ApiError:
    message = (
        "The request signature does not conform to Aliyun standards. The local cloud knows only ACS3-HMAC-SHA256 (V3)."
    )
    return ApiError(400, "IncompleteSignature", message)


def _quoted(text: str) -> str:
    """RFC 3986"""
    return quote(text, safe="~")


log = logging.getLogger(__name__)


@dataclass
class Api:
    """What answers HTTP requests for one cloud. `secrets` is access key id -> secret."""

    cloud: EmulatedCloud
    faults: FaultFile
    secrets: Mapping[str, str]
    seen: Callable[[str, dict[str, str]], None] = lambda action, parameters: None
    """Told of every call that is rightly signed, before it is done."""
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16, "call"))

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.cloud, self.faults)

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Answer one request."""
        request_id, caller = str(uuid.uuid4()).upper(), None
        try:
            request = await _request(http)
            caller = verified(request, self.secrets, time.time())
            self._use_nonce(caller)
            flat = {**request.query, **request.form}
            self.seen(caller.action, flat)
            check(caller.version, caller.action, flat)
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(
                self._threads, self.dispatcher.answer, caller.version, caller.action, flat
            )
            log.info("%s %s", caller.action, request_id)
            return _answered(200, {"RequestId": request_id, **answer}, request_id, {})
        except ApiError as error:
            log.info("%s %s %s", caller.action if caller else "unsigned", error.code, request_id)
            return _refused(error, http.host, request_id)
        except NoAnswerError as cut:
            await asyncio.sleep(cut.hold_s)
            if http.transport:
                http.transport.abort()
            raise web.HTTPServiceUnavailable from None
        except Exception:
            log.exception("%s %s", caller.action if caller else "unsigned", request_id)
            unknown = ApiError(500, "InternalError", "The request processing has failed due to some unknown error.")
            return _refused(unknown, http.host, request_id)

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one call without a signature: (version, action, parameters) as a line of JSON, the answer as one."""
        try:
            call = json.loads(await reader.readline())
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._threads, self.dispatcher.answer, *call)
        except (ApiError, NoAnswerError) as error:
            answer = {"Refusal": str(error)}
        writer.write(f"{json.dumps(answer)}\n".encode())
        writer.close()
        await writer.wait_closed()

    async def date(self, _: web.Request, response: web.StreamResponse) -> None:
        """Every answer tells the time by the cloud's clock."""
        response.headers["Date"] = formatdate(self.cloud.now(), usegmt=True)

    def _use_nonce(self, caller: SignedCaller) -> None:
        now = time.time()
        with self.cloud.lock:
            nonces = self.cloud.account.nonces
            while nonces and now - next(iter(nonces.values())) > 2 * VALID_S:
                del nonces[next(iter(nonces))]
            if caller.nonce in nonces:
                raise ApiError(400, "SignatureNonceUsed", "Specified signature nonce was used already.")
            nonces[caller.nonce] = now


async def _request(http: web.Request) -> Request:
    body = await http.read()
    is_form = http.content_type == "application/x-www-form-urlencoded" and body
    form = {name: str(value) for name, value in (await http.post()).items()} if is_form else {}
    headers = {name.lower(): value for name, value in http.headers.items()}
    return Request(http.method, headers, dict(http.query), form, body, http.path)


def _answered(status: int, content: dict[str, Any], request_id: str, headers: Mapping[str, str]) -> web.Response:
    standard = {"x-acs-request-id": request_id, "x-acs-trace-id": uuid.uuid4().hex, "Server": "spotune local cloud"}
    return web.json_response(content, status=status, headers={**standard, **headers})


def _refused(error: ApiError, host: str, request_id: str) -> web.Response:
    content = {
        "RequestId": request_id,
        "HostId": host,
        "Code": error.code,
        "Message": error.message,
        "Recommend": f"https://api.aliyun.com/troubleshoot?q={error.code}&product=Ecs&requestId={request_id}",
    }
    return _answered(error.status, content, request_id, error.headers)
