"""The local cloud's ECS API for tests: served in this process, over machines on paper."""

import asyncio
import tempfile
import threading
from pathlib import Path

from inventory.localcloud import places
from inventory.localcloud.ecs import lifecycle
from inventory.localcloud.ecs.actions import EmulatedCloud
from inventory.localcloud.ecs.api import Api
from inventory.localcloud.ecs.dispatch import Fault, FaultFile
from inventory.localcloud.ecs.server import serving
from inventory.localcloud.places import Places
from tests.support.fake_machines import FakeMachines
from tests.support.idle import wait_until_idle


class EcsApi:
    """`with EcsApi() as api:` serves on a free port of 127.0.0.1 until the block ends."""

    def __init__(self, folder=None, region="cn-hangzhou"):
        self._temporary = None if folder else tempfile.TemporaryDirectory()
        self.folder = Path(folder or self._temporary.name)
        self.region = region
        self.calls = []
        self.paper = FakeMachines(self.folder / "paper")
        self.access_key_id, self.access_key_secret = places.key_of(self.folder)
        self.faults = FaultFile(self.folder / "faults.json")
        self._told = []

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, *_):
        self._stop()
        if self._temporary:
            self._temporary.cleanup()

    def restart(self):
        """As if the server's process had ended and begun again: all it knows is what it had saved."""
        self._stop()
        self._start()
        for name in self._told:
            self.write_local_state(name)

    @property
    def endpoint(self):
        return f"127.0.0.1:{self.port}"

    def fault(self, action, kind, times=1, skip=0, **more):
        self.faults.add(Fault(action, kind, times, skip, **more))

    def write_local_state(self, name):
        """Let endpoint = "local" of the cluster `name` find this API, under the current XDG_STATE_HOME."""
        folder = Places.of(name).folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        places.tell(folder, self.port)
        (folder / places.CREDENTIALS).write_bytes((self.folder / places.CREDENTIALS).read_bytes())
        (folder / places.CREDENTIALS).chmod(0o600)
        if name not in self._told:
            self._told.append(name)

    def hurry(self, seconds):
        """Put the cloud's clock forward; what its time has come for is done."""
        with self.cloud.lock:
            self.cloud.account.clock_offset_s += seconds
        lifecycle.tick(self.cloud)
        self.settle()

    def settle(self):
        """Wait until nothing goes on in the background: machines have booted, disks are made."""
        wait_until_idle(self.cloud)

    def _start(self):
        self.cloud = EmulatedCloud(self.folder / "world.json", self.paper)
        self.cloud.account.region_id = self.region
        api = Api(self.cloud, self.faults, {self.access_key_id: self.access_key_secret}, self._seen)
        started = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def serve():
            self._ending = asyncio.Event()
            async with serving(api, self.cloud.account.port) as self.port:
                self.cloud.account.port = self.port
                self.cloud.save()
                started.set()
                await self._ending.wait()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),), daemon=True)
        self._thread.start()
        assert started.wait(60), "the API did not start"

    def _stop(self):
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(60)
        wait_until_idle(self.cloud)
        self._loop.close()

    def _seen(self, action, parameters):
        self.calls.append((action, parameters))
