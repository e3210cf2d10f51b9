"""A rented cluster on this machine: the ECS API of the local cloud, driven by the commands a user types."""

import os
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from tests.local_cluster import TypedCluster

TOML = """\
name = "{name}"
provider = "aliyun"
[aliyun]
endpoint = "local"
types = ["ecs.local.small"]
image = "acs:debian_12_x64"
nodes = {nodes}
hours = 2
data_disk_gib = 20
keep_data_disk = "{keep_data_disk}"
[local]
subnet = "{subnet}"
metadata_address = "{metadata}"
"""


class RentedCluster(TypedCluster):
    """Machines that `fab up` rents from a cloud of this cluster's own, whose state is below `folder`."""

    inventory = "inventory/aliyun.py"

    def __init__(self, folder, *, name="cycle", nodes=2, subnet="10.213.85.0/24", keep_data_disk="head", evidence=None):
        metadata = f"100.100.100.{subnet.split('.')[2]}"
        toml = TOML.format(name=name, nodes=nodes, subnet=subnet, metadata=metadata, keep_data_disk=keep_data_disk)
        super().__init__(folder, toml)
        self.name = name
        self.evidence = evidence
        self.state = Path(folder) / "state"
        self.records = Path(folder) / "records"
        self.records.mkdir()
        self.env |= {"XDG_STATE_HOME": str(self.state), "SPOTUNE_ECS_RECORD": str(self.records)}
        for variable in [name for name in self.env if name.startswith("ALIBABA_CLOUD_")]:
            del self.env[variable]  # the user's own account is none of a test's business

    def call(self, *argv, timeout=600, env=None):
        done = super().call(*argv, timeout=timeout, env=env)
        if self.evidence:
            self.evidence.said(" ".join(map(str, argv)), done.stdout)
        return done

    def deploy(self, timeout=1500):
        code, results, log = super().deploy(timeout)
        if self.evidence:
            self.evidence.said("base deploy", log)
        return code, results, log

    @contextmanager
    def at_home(self):
        """Inside, this process looks for state where the commands do."""
        before = {name: os.environ.get(name) for name in ("XDG_STATE_HOME", "SPOTUNE_ECS_RECORD")}
        os.environ.update({name: self.env[name] for name in before})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    @cached_property
    def _cluster(self):
        with self.at_home():
            return super().cluster

    @property
    def cluster(self):
        """Settings and nodes; asked of the cloud again after `changed`."""
        return self._cluster

    def changed(self):
        """Machines came or went."""
        self.__dict__.pop("_cluster", None)

    @property
    def cloud_folder(self):
        """Where the cloud on this machine keeps its world, its log and its disks."""
        return self.state / "spotune" / "localcloud" / self.name

    @cached_property
    def ecs(self):
        """The API, asked as the program asks it."""
        from inventory.aliyun_ecs.ecs import Ecs
        from inventory.settings import load_settings

        with self.at_home():
            return Ecs.open(load_settings(self.toml))

    def serve(self):
        done = self.fab("local.serve", timeout=900)
        assert done.returncode == 0, done.stdout
        return done

    def up(self, *flags):
        done = self.fab("up", "--yes", *flags)
        self.changed()
        assert done.returncode == 0, done.stdout
        return done

    def rebuild(self, *flags):
        done = self.fab("rebuild", "--yes", *flags, timeout=1500)
        self.changed()
        assert done.returncode == 0, done.stdout
        return done

    def down(self, *flags):
        done = self.fab("down", "--yes", *flags)
        self.changed()
        assert done.returncode == 0, done.stdout
        return done

    def leave(self):
        """Nothing of it stays on this machine, whatever state it is in."""
        self.changed()
        self.fab("local.down")

    def host_keys(self):
        """Each machine's own host key, as it shows it itself."""
        names = [node.name for node in self.cluster.nodes]
        return {name: self.on(name, "cat /etc/ssh/ssh_host_ed25519_key.pub").split()[1] for name in names}
