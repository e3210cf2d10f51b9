"""A cluster rented from the cloud in memory."""

from inventory.renting import down, report, tags
from inventory.renting.ledger import Ledger
from inventory.renting.machines import apply_plan
from inventory.renting.plan import RentalWish, plan_up
from inventory.renting.tags import StateFiles
from tests.support.memory_settings import MemorySettings
from tests.support.paper_cluster import rsa_key


class Rented:
    """A cluster of a cloud in memory, with the questions a user's commands put."""

    def __init__(self, folder, cloud, **table):
        settings = {"name": "demo", "ssh": {"key": f"{folder}/no-key"}, "memory": table}
        self.cloud, self.settings, self.said = cloud, MemorySettings.model_validate(settings), []
        self.places = StateFiles.of("demo")
        self.places.make()
        private, public = rsa_key()
        self.places.own_key.write_bytes(private)
        self.places.own_key.with_name("id_rsa.pub").write_bytes(public)

    def plan(self, nodes, hours=4, **wish):
        return plan_up(self.cloud, self.settings, RentalWish(nodes, hours, **wish))

    def up(self, nodes, hours=4, **wish):
        plan = self.plan(nodes, hours, **wish)
        machines = apply_plan(self.cloud, self.settings, plan, self.said.append)
        return {each.name: each for each in machines}

    def down(self, disks=False, nodes=()):
        plan = down.plan_down(self.cloud, self.settings, disks, nodes=nodes)
        down.apply_down(self.cloud, self.settings, plan, self.said.append)
        return list(report.down_lines(plan, self.settings))

    @property
    def book(self):
        return Ledger.of(self.cloud, self.settings)

    @property
    def data_disks(self):
        return [disk for disk in self.cloud.disks(tags=tags.of_cluster("demo")) if disk.kind == "data"]
