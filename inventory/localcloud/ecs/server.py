"""The API's HTTP server: loopback only, every call signed.

python -m inventory.localcloud.ecs.server --cloud NAME --subnet CIDR --region R --metadata ADDRESS
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from aiohttp import web

from inventory.localcloud.ecs import (
    assistant,
    client_files,
    clock,
    disks,
    images,
    instances,
    key_pairs,
    lifecycle,
    network,
    offers,
    region,
    security_groups,
    snapshots,
    tagging,
)
from inventory.localcloud.ecs.actions import ApiError, Cloud
from inventory.localcloud.ecs.dispatch import Dispatcher, NoAnswerError
from inventory.localcloud.ecs.faults import FaultFile
from inventory.localcloud.ecs.hosts import Hosts
from inventory.localcloud.ecs.signature import COMMON, VALID_S, Caller, Request, verified
from inventory.localcloud.places import Places

LOOPBACK = "127.0.0.1"
LONGEST_LINE = 256 * 1024
"""The SDK puts a script for the Cloud Assistant into the URL."""
TICK_S = 0.5
ACTIONS_OF = (
    *(key_pairs, assistant, disks, clock, instances, lifecycle, network),
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

    def _use_nonce(self, caller: Caller) -> None:
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
    await asyncio.to_thread(clock.resume, api.cloud)
    ticking = asyncio.create_task(_keep_time(api.cloud))
    try:
        yield await _listen(runner, port)
    finally:
        ticking.cancel()
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
    """Let the cloud's clock tick for ever."""
    while True:
        try:
            await asyncio.to_thread(clock.tick, cloud)
        except Exception:
            log.exception("what the clock began failed")
        await asyncio.sleep(TICK_S)


def main() -> None:
    """Serve a cloud until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m inventory.localcloud.ecs.server")
    for name in ("cloud", "subnet", "region", "metadata"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    places = Places.of(args.cloud)
    machines = Hosts(places, IPv4Network(args.subnet), args.metadata)
    cloud = Cloud(places.world, machines, args.subnet)
    cloud.account.region_id = args.region
    machines.begin(cloud)
    try:
        asyncio.run(_serve_until_told(cloud, places.folder))
    finally:
        machines.end()


async def _serve_until_told(cloud: Cloud, folder: Path) -> None:
    key = client_files.key_of(folder)
    api = Api(cloud, FaultFile(folder / "faults.json"), dict([key]))
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    with client_files.control_socket(folder) as path:
        control = await asyncio.start_unix_server(api.control, path)
    async with control, serving(api, cloud.account.port) as port:
        cloud.account.port = port
        cloud.save()
        client_files.tell(folder, port)
        log.info("serving on %s:%d", LOOPBACK, port)
        await stop.wait()
    with contextlib.suppress(FileNotFoundError):
        (folder / client_files.ADDRESS).unlink()


if __name__ == "__main__":
    main()
