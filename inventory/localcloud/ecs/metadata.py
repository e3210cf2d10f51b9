"""The metadata service: what a machine asks about itself, at one address on our own bridge and nowhere else."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from inventory.localcloud.commands import LocalCloudError, run
from inventory.localcloud.ecs import actions
from inventory.localcloud.ecs.account import EmulatedInstance
from inventory.localcloud.ecs.actions import EmulatedCloud

PORT = 80
TOKEN_HEADER = "X-aliyun-ecs-metadata-token"
LONGEST_TOKEN_S = 21_600
OWN_FILES = ("instance-id", "hostname", "image-id", "zone-id", "vpc-id", "vswitch-id")
Tree = dict[str, Any]


def tree(cloud: EmulatedCloud, instance: EmulatedInstance) -> Tree:
    """What lies below /latest/meta-data: folders are dicts, files are texts; what there is not is left out."""
    about: Tree = {"instance-type": instance.instance_type, "instance-name": instance.name}
    if instance.noticed:
        about["spot"] = {"termination-time": actions.second(instance.reclaim_at)}
    return {
        **{name: getattr(instance, name.replace("-", "_")) for name in OWN_FILES},
        "region-id": cloud.account.region_id,
        "private-ipv4": instance.address,
        "instance": about,
    }


def text(of: Tree, path: str) -> str | None:
    """A file's text, or a folder's listing, with / after what are folders; None where there is neither. Pure."""
    here: Any = of
    for word in filter(None, path.split("/")):
        if not isinstance(here, dict) or word not in here:
            return None
        here = here[word]
    if isinstance(here, dict):
        return "\n".join(f"{name}/" if isinstance(value, dict) else name for name, value in sorted(here.items()))
    return str(here)


@dataclass
class Service:
    """Answers machines by the address they ask from."""

    cloud: EmulatedCloud
    _tokens: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Token -> the instance it was given to, and when it ends."""
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_put("/latest/api/token", self._give_token)
        app.router.add_get("/latest/meta-data{path:(/.*)?}", self._meta_data)
        return app

    def _asking(self, request: web.Request) -> EmulatedInstance:
        with self.cloud.lock:
            for instance in self.cloud.account.instances.values():
                if instance.address == request.remote:
                    return instance
        raise web.HTTPNotFound

    def _allowed(self, request: web.Request) -> EmulatedInstance:
        instance, token = self._asking(request), request.headers.get(TOKEN_HEADER)
        owner, ends = self._tokens.get(token or "", ("", 0.0))
        if token is not None and (owner != instance.instance_id or time.monotonic() > ends):
            raise web.HTTPUnauthorized
        return instance

    async def _give_token(self, request: web.Request) -> web.Response:
        instance = self._asking(request)
        lifetime = request.headers.get(f"{TOKEN_HEADER}-ttl-seconds", "")
        if not lifetime.isdecimal() or not 1 <= int(lifetime) <= LONGEST_TOKEN_S:
            raise web.HTTPBadRequest
        now = time.monotonic()
        self._tokens = {each: of for each, of in self._tokens.items() if of[1] > now}
        token = secrets.token_urlsafe(32)
        self._tokens[token] = (instance.instance_id, now + int(lifetime))
        return web.Response(text=token)

    async def _meta_data(self, request: web.Request) -> web.Response:
        instance = self._allowed(request)
        with self.cloud.lock:
            found = text(tree(self.cloud, instance), request.match_info["path"])
        if found is None:
            raise web.HTTPNotFound
        return web.Response(text=found)

    def listen(self, sock: socket.socket) -> None:
        """Answer on a bound socket, in a thread of its own."""
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def serve() -> None:
            runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=0.5)
            await runner.setup()
            await web.SockSite(runner, sock).start()
            self._stop = asyncio.Event()
            ready.set()
            await self._stop.wait()
            await runner.cleanup()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),), daemon=True)
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """Close the socket."""
        if self._loop and self._thread:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=5)


def start(cloud: EmulatedCloud, address: str, bridge: str) -> Service:
    """Put the address on the bridge and answer there, to what comes in by this bridge only.

    Several clouds have the same address, each on its own bridge. Raises LocalCloudError.
    """
    run("ip", "address", "replace", f"{address}/32", "dev", bridge)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, bridge.encode())
        sock.bind((address, PORT))
        sock.listen()
    except OSError as error:
        sock.close()
        taken = f"the metadata service cannot listen at {address}:{PORT} on {bridge}: {error.strerror}"
        raise LocalCloudError(f"{taken}; local.metadata_address in cluster.toml names another address") from error
    sock.setblocking(False)
    service = Service(cloud)
    service.listen(sock)
    return service
