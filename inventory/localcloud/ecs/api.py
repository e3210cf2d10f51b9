"""From an HTTP request to its answer: who signed it, whether he may, what became of it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

from aiohttp import web

from inventory.localcloud.ecs import contract
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud
from inventory.localcloud.ecs.dispatch import Dispatcher, NoAnswerError
from inventory.localcloud.ecs.faults import FaultFile
from inventory.localcloud.ecs.signature import VALID_S, Request, SignedCaller, verified

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
            contract.check(caller.version, caller.action, flat)
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
            asked = json.loads(await reader.readline())
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._threads, self.dispatcher.answer, *asked)
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
    told = {"x-acs-request-id": request_id, "x-acs-trace-id": uuid.uuid4().hex, "Server": "spotune local cloud"}
    return web.json_response(content, status=status, headers={**told, **headers})


def _refused(error: ApiError, host: str, request_id: str) -> web.Response:
    content = {
        "RequestId": request_id,
        "HostId": host,
        "Code": error.code,
        "Message": error.message,
        "Recommend": f"https://api.aliyun.com/troubleshoot?q={error.code}&product=Ecs&requestId={request_id}",
    }
    return _answered(error.status, content, request_id, error.headers)
