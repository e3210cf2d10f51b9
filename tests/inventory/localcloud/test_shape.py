"""How slow a host's cable and CPU are to be: what may be asked, what is kept of it, and what the kernel is told."""

from pathlib import Path

import pytest

from inventory.localcloud import shape
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs import account
from inventory.localcloud.inside import CpuTree, cpu_tree
from inventory.localcloud.network import tbf
from inventory.localcloud.places import Places
from inventory.localcloud.served import reshape
from inventory.localcloud.shape import Shape, asked


@pytest.fixture
def places(tmp_path):
    for name in ("m1", "m2"):
        (tmp_path / "hosts" / name).mkdir(parents=True)
    return Places("cc", tmp_path)


def bucket(mbit):
    words = tbf(mbit)
    return dict(zip(words[1::2], words[2::2], strict=True))


def test_what_is_not_named_is_not_limited():
    assert asked("33", "", False, cores=2) == Shape(mbit=33)
    assert asked("", "0.5", False, cores=2) == Shape(cpu=0.5)
    assert asked("", "", True, cores=2) == Shape()


@pytest.mark.parametrize("mbit", ["0", "-5", "fast", "nan", "inf", "20000", "0.01"])
def test_a_rate_that_is_none_is_refused_with_those_there_are(mbit):
    with pytest.raises(LocalCloudError, match=rf"^--mbit {mbit}: a link takes Mbit/s from 0.1 to 10000$"):
        asked(mbit, "", False, cores=2)


@pytest.mark.parametrize("cpu", ["0", "-1", "2.5", "half", "0.01"])
def test_more_cores_than_there_are_and_less_than_a_tenth_are_refused(cpu):
    with pytest.raises(LocalCloudError, match=rf"^--cpu {cpu}: a host takes from 0.1 to 2 cores of this machine's$"):
        asked("33", cpu, False, cores=2)


def test_nothing_asked_and_off_with_a_limit_are_refused():
    with pytest.raises(LocalCloudError, match="say --mbit N, --cpu N or both"):
        asked("", "", False, cores=2)
    with pytest.raises(LocalCloudError, match="--off takes every limit away"):
        asked("33", "", True, cores=2)


def test_a_shape_says_itself_in_words():
    assert str(Shape(33, 0.5)) == "33 Mbit/s each way, 0.5 cores"
    assert str(Shape(cpu=1)) == "1 core"
    assert str(Shape()) == ""


def test_a_bucket_holds_two_packets_at_the_slowest_rate_and_ten_milliseconds_at_others():
    assert bucket(33) == {"rate": "33000000bit", "burst": "41250", "limit": str(41250 + 412500)}
    assert int(bucket(0.1)["burst"]) >= 2 * 1514
    assert int(bucket(0.1)["limit"]) >= 12 * 1514


def test_what_is_asked_of_all_holds_for_hosts_to_come_and_what_is_asked_of_one_goes_before_it(places):
    shape.ask_all(places, Shape(33, 0.5))
    shape.ask_one(places, "m2", Shape(10))
    assert shape.of_host(places, "m1") == shape.of_host(places, "m9") == Shape(33, 0.5)
    assert shape.of_host(places, "m2") == Shape(10)
    shape.ask_one(places, "m2", Shape())
    assert shape.of_host(places, "m2") == Shape()


def test_what_is_asked_of_all_ends_what_was_asked_of_one(places):
    shape.ask_one(places, "m2", Shape(10))
    shape.ask_all(places, Shape(33))
    assert shape.of_host(places, "m2") == Shape(33)
    shape.ask_all(places, Shape())
    assert shape.of_host(places, "m1") == shape.for_later(places) == Shape()


def test_a_record_that_cannot_be_read_is_named_with_what_writes_it_anew(places):
    (places.folder / "shape.json").write_text('{"gbit": 3}')
    with pytest.raises(LocalCloudError, match=r"shape\.json cannot be read.*fab local\.shape"):
        shape.of_host(places, "m1")


def test_an_unknown_host_is_refused_before_any_is_slowed(places):
    account.save(places.world, account.Account())
    with pytest.raises(LocalCloudError, match="there is no machine 'te9'"):
        reshape(places, ["te9"], Shape(33))
    assert not list(places.folder.rglob("shape.json"))


def test_without_a_cloud_it_is_one_sentence(tmp_path):
    with pytest.raises(LocalCloudError, match=r"there is no cloud 'cc' on this machine; start it: fab local\.serve"):
        reshape(Places("cc", tmp_path / "none"), [], Shape(33))


def test_a_host_that_boots_where_nothing_was_asked_starts_nothing_beside(places):
    from inventory.localcloud.commands import attempt

    script = shape.at_boot(places, "m1").replace("exec ", "echo would run ")
    assert attempt("sh", "-c", script).stdout == ""
    shape.ask_all(places, Shape(33))
    assert attempt("sh", "-c", script).stdout.endswith("-m inventory.localcloud.shape cc m1\n")


def test_quotas_are_where_the_cpu_controller_is_on_both_layouts():
    unified = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    hybrid = (
        "30 1 0:26 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "31 1 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
        "32 1 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    )
    assert cpu_tree(unified) == CpuTree(Path("/sys/fs/cgroup"), unified=True)
    assert cpu_tree(hybrid) == CpuTree(Path("/sys/fs/cgroup/cpu,cpuacct"), unified=False)
    assert cpu_tree("30 1 8:1 / / rw - ext4 d rw") is None
