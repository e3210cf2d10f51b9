"""What a cloud refuses while machines are ordered and released: nothing is forgotten that may be billed, no disk is
lost that was to stay, and the refusal of one machine is of no other."""

from dataclasses import replace

import pytest

from inventory.aliyun_ecs.errors import classify, sentence
from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Ability
from inventory.cloud.values import Disk
from inventory.renting import down, report, tags
from inventory.renting.intents import Intents
from tests.support.amount import Amount
from tests.support.memory_cloud import MemoryCloud
from tests.support.rented_in_memory import Rented


@pytest.fixture
def rented(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("inventory.renting.machines.reached", lambda *_: None)
    told = tags.number
    monkeypatch.setattr(tags, "number", lambda *given: None if (n := told(*given)) is None else Amount(n))
    return lambda cloud=None, **table: Rented(tmp_path, cloud or MemoryCloud(), **table)


def refusal(action, status, code, message="No."):
    kind = classify(code, status, message)
    return CloudError(sentence(action, code, message, kind), kind, code)


class Refusing(MemoryCloud):
    """Refuses orders in the first zone that it is asked for."""

    def __init__(self, *error):
        super().__init__()
        self.zone, self.error = None, refusal("RunInstances", *error)

    def run(self, launch, token, *, attempts=None):
        self.zone = self.zone or launch.zone_id
        if launch.zone_id == self.zone:
            raise self.error
        return super().run(launch, token, attempts=attempts)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("InvalidResourceType.NotSupported", "No."),
        ("OperationDenied", "Sales of this resource are temporarily suspended in the specified region."),
        ("OperationDenied", "The creation of Instance to the specified Zone is not allowed."),
        ("ZoneId.NotFound", "No."),
        ("QuotaExceed.ElasticQuota", "No."),
        ("Brand.New", "No."),
    ],
)
def test_a_refusal_in_one_zone_is_not_the_end(rented, code, message):
    cluster = rented(Refusing(403, code, message))
    assert len(cluster.up(2)) == 2
    assert any(code in line or "no stock" in line for line in cluster.said)


@pytest.mark.parametrize("code", ["OperationDenied.CloudSSDNotSupported", "OperationDenied.DiskCategoryNotSupport"])
def test_a_disk_kind_that_is_refused_names_its_setting(rented, code):
    with pytest.raises(RentError, match="disk_category"):
        rented(Refusing(403, code)).up(2)


class Lagging(MemoryCloud):
    """What is ordered is in no list, and unknown to a deletion, until it was looked for so often."""

    pace = replace(MemoryCloud.pace, settle_s=60, listed_s=60)  # the looks may take any time

    def __init__(self, looks, **more):
        super().__init__(**more)
        self.looks = looks

    def instances(self, *, tags=None, ids=None):
        self.looks -= bool(self.orders)
        return () if self.orders and self.looks > 0 else super().instances(tags=tags, ids=ids)

    def delete(self, kind, ids, token=""):
        if self.looks <= 0:
            super().delete(kind, ids, token)


class HalfSold(Lagging):
    """Has one machine; each order is of one."""

    def __init__(self, looks):
        super().__init__(looks, abilities=frozenset(Ability) - {Ability.ORDERED_NAMES})

    def run(self, launch, token, *, attempts=None):
        if self.orders:
            raise refusal("RunInstances", 403, "OperationDenied.NoStock")
        return super().run(launch, token, attempts=attempts)


def test_a_machine_of_an_undone_order_that_is_listed_late_is_deleted(rented):
    cluster = rented(HalfSold(looks=3))
    with pytest.raises(CloudError, match="nothing was kept"):
        cluster.up(2)
    assert cluster.cloud.instances() == () and Intents.of(cluster.settings).pending() == {}


def test_one_that_is_still_in_no_list_is_named_and_the_next_command_finds_it(rented):
    cluster = rented(HalfSold(looks=10_000))
    cluster.cloud.pace = MemoryCloud.pace  # gives up after 0.01 s
    with pytest.raises(CloudError, match="may still come: fab down looks for them"):
        cluster.up(2)
    (intent,) = Intents.of(cluster.settings).pending().values()
    assert intent.ids and any(f"{intent.ids[0]}: not listed by the cloud yet" in line for line in cluster.said)
    cluster.cloud.looks = 0
    assert [each.instance_id for each in cluster.cloud.instances()] == [*intent.ids]
    cluster.down()
    assert cluster.cloud.instances() == () and Intents.of(cluster.settings).pending() == {}


def test_an_order_whose_answer_is_lost_and_whose_repetition_is_refused_is_looked_for(rented):
    class Expired(Lagging):
        def run(self, launch, token, *, attempts=None):
            super().run(launch, token, attempts=attempts)
            raise CloudError("the key has expired", Kind.AUTH, "InvalidSecurityToken.Expired", undecided=True)

    cluster = rented(Expired(looks=3))
    with pytest.raises(CloudError, match="expired"):
        cluster.up(1)
    assert "looking whether the cloud heard what it did not answer" in cluster.said
    assert cluster.cloud.instances() == ()


class Protected(MemoryCloud):
    """te1 is protected from deletion; a call is for all of its machines or none."""

    def delete(self, kind, ids, token=""):
        if kind == "instance" and any(self.all[each].name == "demo-te1" for each in ids):
            raise refusal("DeleteInstances", 403, "InvalidOperation.DeletionProtection")
        super().delete(kind, ids, token)


def test_one_protected_machine_does_not_keep_the_others_billed(rented):
    cluster = rented(Protected())
    cluster.up(3)
    with pytest.raises(CloudError, match=r"^te1: not deleted, and billed: .*console"):
        cluster.down()
    assert [each.name for each in cluster.cloud.instances()] == ["demo-te1"]


class SecurityLocked(MemoryCloud):
    """As the vendor documents it: a machine that is locked for security takes all of its disks along."""

    def delete(self, kind, instance_ids, token=""):
        for disk in self._found(Disk):
            if disk.instance_id in instance_ids and "security" in self.all[disk.instance_id].locks:
                self.all[disk.disk_id] = replace(disk, delete_with_instance=True)
        super().delete(kind, instance_ids, token)

    def start(self, instance_ids):
        raise refusal("StartInstances", 403, "InstanceLockedForSecurity")


def locked_head(cluster, status="Running"):
    head = cluster.up(2)["demo-te1"]
    cluster.cloud.all[head.instance_id] = replace(head, locks=("security",), status=status)


def test_a_machine_under_a_security_lock_stays_with_the_disk_that_would_go_with_it(rented):
    cluster = rented(SecurityLocked())
    locked_head(cluster)
    plan = down.plan_down(cluster.cloud, cluster.settings, False)
    lines = "\n".join(report.down_lines(plan, cluster.settings))
    assert "te1 stays: the cloud has locked it for security" in lines and "remain  te1" in lines
    assert "stays data disk of te1" not in lines
    down.apply_down(cluster.cloud, cluster.settings, plan, cluster.said.append)
    assert [each.name for each in cluster.cloud.instances()] == ["demo-te1"]
    assert len(cluster.data_disks) == 1


def test_a_locked_machine_goes_where_its_disks_are_given_up(rented):
    cluster = rented(SecurityLocked())
    locked_head(cluster)
    cluster.down(disks=True)
    assert cluster.cloud.instances() == () and cluster.data_disks == []


def test_a_stopped_machine_that_is_locked_names_the_lock_and_the_console(rented):
    cluster = rented(SecurityLocked())
    locked_head(cluster, "Stopped")
    with pytest.raises(CloudError, match=r"locked.*console"):
        cluster.up(2)


def test_a_key_pair_that_is_still_in_use_does_not_fail_a_down(rented):
    class Slow(MemoryCloud):
        def delete(self, kind, ids, token=""):
            super().delete(kind, ids, token)
            if kind == "key pair":
                raise refusal("DeleteKeyPairs", 400, "InvalidParameter.KeypairAlreadyAttachedInstance")

    cluster = rented(Slow())
    cluster.up(1)
    cluster.down()
    assert cluster.cloud.instances() == () and any("is still in use, and free" in line for line in cluster.said)
