"""The API's HTTP server: loopback only, every call signed.

python -m inventory.localcloud.ecs.server --cloud NAME --subnet CIDR --region R --metadata ADDRESS
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Network
from pathlib import Path

from aiohttp import web

from inventory import local_address
from inventory.localcloud import places
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs import catalogue, disks, instances, lifecycle, listing, network, offers
from inventory.localcloud.ecs.actions import EmulatedCloud
from inventory.localcloud.ecs.api import Api
from inventory.localcloud.ecs.dispatch import FaultFile
from inventory.localcloud.ecs.hosts import Hosts
from inventory.localcloud.places import Places

LOOPBACK = "127.0.0.1"
LONGEST_LINE = 256 * 1024
"""The SDK puts a script for the Cloud Assistant into the URL."""
TICK_S = 0.5
ACTIONS_OF = (network, lifecycle, disks, instances, catalogue, offers, listing)
"""The modules whose actions it answers: they have registered themselves."""
log = logging.getLogger(__name__)


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
    await asyncio.to_thread(lifecycle.resume, api.cloud)
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


async def _keep_time(cloud: EmulatedCloud) -> None:
    """Let the cloud's clock tick for ever."""
    while True:
        try:
            await asyncio.to_thread(lifecycle.tick, cloud)
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
    cloud = EmulatedCloud(places.world, machines, args.subnet)
    cloud.account.region_id = args.region
    try:
        machines.begin(cloud)
    except LocalCloudError as error:
        raise SystemExit(str(error)) from None  # the last line of the log, which `fab local.serve` shows
    try:
        asyncio.run(_serve_until_told(cloud, places.folder))
    finally:
        machines.end()


async def _serve_until_told(cloud: EmulatedCloud, folder: Path) -> None:
    key = places.key_of(folder)
    api = Api(cloud, FaultFile(folder / "faults.json"), dict([key]))
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    with places.control_socket(folder) as path:
        control = await asyncio.start_unix_server(api.control, path)
    async with control, serving(api, cloud.account.port) as port:
        cloud.account.port = port
        cloud.save()
        places.tell(folder, port)
        log.info("serving on %s:%d", LOOPBACK, port)
        await stop.wait()
    with contextlib.suppress(FileNotFoundError):
        (folder / local_address.ADDRESS).unlink()


if __name__ == "__main__":
    main()
