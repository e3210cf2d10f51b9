"""The API's HTTP server: loopback only, every call signed.

python -m inventory.localcloud.ecs.server --cloud NAME --subnet CIDR --region R --folder FOLDER [--metadata ADDRESS]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from aiohttp import web

from inventory.localcloud.ecs import (
    access,
    assistant,
    control,
    disks,
    due,
    images,
    instances,
    keys,
    network,
    offers,
    region,
    security_groups,
    snapshots,
    tagging,
)
from inventory.localcloud.ecs.calls import ApiError, Cloud
from inventory.localcloud.ecs.dispatch import Dispatcher, NoAnswerError
from inventory.localcloud.ecs.faults import FaultFile
from inventory.localcloud.ecs.hosts import Hosts
from inventory.localcloud.ecs.signature import COMMON, VALID_S, Caller, Request, verified

LOOPBACK = "127.0.0.1"
LONGEST_LINE = 256 * 1024
"""The SDK puts user data into the URL."""
DUE_EVERY_S = 0.5
ACTIONS_OF = (
    *(access, assistant, control, disks, instances, network),
    *(images, offers, region, security_groups, snapshots, tagging),
)
"""The modules whose actions it answers: they have registered themselves."""
log = logging.getLogger(__name__)


@dataclass
class Api:
    """What answers HTTP requests for one cloud. `secrets` is access key id -> secret."""

    cloud: Cloud
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
            flat = {k: v for k, v in {**request.query, **request.form}.items() if k not in COMMON}
            self.seen(caller.action, flat)
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(
                self._threads, self.dispatcher.answer, caller.version, caller.action, flat
            )
            log.info("%s %s", caller.action, request_id)
            return _answered(200, {"RequestId": request_id, **answer}, request_id, {})
        except ApiError as error:
            log.info("%s %s %s", caller.action if caller else "unsigned", error.code, request_id)
            return _refused(error, http.host, request_id, bool(caller and caller.xml) or _wants_xml(http))
        except NoAnswerError as cut:
            await asyncio.sleep(cut.hold_s)
            if http.transport:
                http.transport.abort()
            raise web.HTTPServiceUnavailable from None
        except Exception:
            log.exception("%s %s", caller.action if caller else "unsigned", request_id)
            unknown = ApiError(500, "InternalError", "The request processing has failed due to some unknown error.")
            return _refused(unknown, http.host, request_id, False)

    async def date(self, _: web.Request, response: web.StreamResponse) -> None:
        """Every answer tells the time by the cloud's clock."""
        response.headers["Date"] = formatdate(self.cloud.now(), usegmt=True)

    def _use_nonce(self, caller: Caller) -> None:
        now = time.time()
        with self.cloud.lock:
            nonces = self.cloud.world.nonces
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


def _wants_xml(http: web.Request) -> bool:
    return http.query.get("Format", "").upper() == "XML"


def _answered(status: int, content: dict[str, Any], request_id: str, headers: Mapping[str, str]) -> web.Response:
    return web.json_response(content, status=status, headers={**_common(request_id), **headers})


def _common(request_id: str) -> dict[str, str]:
    return {"x-acs-request-id": request_id, "x-acs-trace-id": uuid.uuid4().hex, "Server": "spotune local cloud"}


def _refused(error: ApiError, host: str, request_id: str, xml: bool) -> web.Response:
    content = {
        "RequestId": request_id,
        "HostId": host,
        "Code": error.code,
        "Message": error.message,
        "Recommend": f"https://api.aliyun.com/troubleshoot?q={error.code}&product=Ecs&requestId={request_id}",
    }
    if not xml:
        return _answered(error.status, content, request_id, error.headers)
    inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in content.items())
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error>{inner}</Error>'
    headers = {**_common(request_id), **error.headers, "Content-Type": "text/xml;charset=utf-8"}
    return web.Response(body=text.encode(), status=error.status, headers=headers)


@asynccontextmanager
async def serving(api: Api, port: int = 0) -> AsyncIterator[int]:
    """Serve on loopback; the port, which is the one asked for where it is free."""
    app = web.Application(client_max_size=1024 * 1024)
    app.router.add_route("*", "/", api.handle)
    app.on_response_prepare.append(api.date)
    runner = web.AppRunner(
        app, access_log=None, max_line_size=LONGEST_LINE, max_field_size=LONGEST_LINE, shutdown_timeout=1
    )
    await runner.setup()
    await asyncio.to_thread(due.go_on, api.cloud)
    clock = asyncio.create_task(_keep_time(api.cloud))
    try:
        yield await _listen(runner, port)
    finally:
        clock.cancel()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, port: int) -> int:
    for wanted in dict.fromkeys((port, 0)):
        site = web.TCPSite(runner, LOOPBACK, wanted)
        try:
            await site.start()
        except OSError:
            if wanted == 0:
                raise
            await site.stop()
            continue
        return int(runner.addresses[0][1])
    raise AssertionError("port 0 is always free")


async def _keep_time(cloud: Cloud) -> None:
    """Do what is due by the cloud's clock, for ever."""
    while True:
        try:
            await asyncio.to_thread(due.do_what_is_due, cloud)
        except Exception:
            log.exception("what was due failed")
        await asyncio.sleep(DUE_EVERY_S)


def main() -> None:
    """Serve a cloud until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m inventory.localcloud.ecs.server")
    for name in ("cloud", "subnet", "region", "folder"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--metadata", default="", help="address of the metadata service in the hosts; empty: none")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    folder = Path(args.folder)
    machines = Hosts.of(args.cloud, args.subnet, args.metadata)
    cloud = Cloud(folder / "world.json", machines, args.subnet)
    cloud.world.region_id = args.region
    machines.begin(cloud)
    try:
        asyncio.run(_serve_until_told(cloud, folder))
    finally:
        machines.end()


async def _serve_until_told(cloud: Cloud, folder: Path) -> None:
    key = keys.key_of(folder)
    api = Api(cloud, FaultFile(folder / "faults.json"), dict([key]))
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    async with serving(api, cloud.world.port) as port:
        cloud.world.port = port
        cloud.save()
        keys.tell(folder, port)
        log.info("serving on %s:%d", LOOPBACK, port)
        await stop.wait()
    with contextlib.suppress(FileNotFoundError):
        (folder / keys.ADDRESS).unlink()


if __name__ == "__main__":
    main()
