"""The metadata service as its clients see it, and the tables of a host's disks."""

import socket
import subprocess
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from inventory.localcloud import disk
from inventory.localcloud.commands import mounts_of
from inventory.localcloud.ecs import hosts, lifecycle
from tests.support.rented_on_paper import PaperCloud

TOKEN = "X-aliyun-ecs-metadata-token"


@pytest.fixture
def cloud(tmp_path):
    return PaperCloud(tmp_path)


@pytest.fixture
def service(cloud):
    """The service on loopback; the machine whose address is 127.0.0.1 asks."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    each = hosts.Service(cloud.cloud)
    each.listen(sock)
    each.base = f"http://127.0.0.1:{sock.getsockname()[1]}/latest"
    yield each
    each.stop()


def machine(cloud, **flat):
    (instance_id,) = cloud.run(SpotStrategy="SpotAsPriceGo", **flat)
    cloud.cloud.account.instances[instance_id].address = "127.0.0.1"
    return instance_id


def ask(url, method="GET", **headers):
    """(status, text) of a request."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, method=method, headers=named), timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def token_of(service, seconds="60"):
    return ask(f"{service.base}/api/token", "PUT", **{f"{TOKEN}-ttl-seconds": seconds})


def test_a_machine_reads_about_itself_and_nobody_else_anything(cloud, service):
    assert ask(f"{service.base}/meta-data/instance-id")[0] == 404
    instance_id = machine(cloud)
    assert ask(f"{service.base}/meta-data/instance-id") == (200, instance_id)
    assert ask(f"{service.base}/meta-data/instance/instance-type") == (200, "ecs.local.small")
    assert ask(f"{service.base}/meta-data/nothing")[0] == 404


def test_the_notice_is_not_there_until_the_machine_is_reclaimed(cloud, service):
    instance_id, path = machine(cloud), f"{service.base}/meta-data/instance/spot/termination-time"
    assert ask(path)[0] == 404
    began = cloud.cloud.now()
    lifecycle.reclaim(cloud.cloud, instance_id, 300)
    status, told = ask(path)
    ends = time.mktime(time.strptime(told, "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    assert status == 200
    assert began + 299 <= ends <= cloud.cloud.now() + 301


def test_tokens_live_as_long_as_told_and_are_the_machines_own(cloud, service, monkeypatch):
    now = 0.0
    monkeypatch.setattr("inventory.localcloud.ecs.hosts.time", SimpleNamespace(monotonic=lambda: now))
    first = machine(cloud)
    path = f"{service.base}/meta-data/instance-id"
    assert [token_of(service, seconds)[0] for seconds in ("0", "21601", "x", "1", "21600")] == [400, 400, 400, 200, 200]
    _, token = token_of(service, "1")
    assert ask(path, **{TOKEN: token}) == (200, first)
    assert ask(path, **{TOKEN: "another"})[0] == 401
    cloud.cloud.account.instances[first].address = "10.0.0.1"
    machine(cloud)
    assert ask(path, **{TOKEN: token})[0] == 401
    cloud.cloud.account.instances[first].address = "127.0.0.1"
    now = 1.1
    assert ask(path, **{TOKEN: token})[0] == 401


def test_disks_that_stay_keep_their_names_when_others_come_and_go():
    before = disk.renewed_table("", [("loop1", "a"), ("loop2", "b")])
    assert before == "vdb loop1 a\nvdc loop2 b\n"
    assert disk.renewed_table(before, [("loop2", "b")]) == "vdc loop2 b\n"
    assert disk.renewed_table("vdc loop2 b\n", [("loop2", "b"), ("loop7", "c")]) == "vdb loop7 c\nvdc loop2 b\n"
    assert disk.rows(before) == [("vdb", "loop1", "a"), ("vdc", "loop2", "b")]


def test_mounts_of_a_device_are_found_by_its_number():
    mountinfo = (
        "21 1 7:3 / /data rw - ext4 /dev/vdb rw\n"
        "22 1 7:30 / /other rw - ext4 /dev/vdc rw\n"
        "23 21 7:3 /sub /mnt/a\\040b rw - ext4 /dev/vdb rw\n"
    )
    assert [str(point) for point in mounts_of(mountinfo, {"7:3"})] == ["/mnt/a b", "/data"]


def test_a_copy_of_a_disk_leaves_out_its_holes_and_is_whole_or_not_there(tmp_path):
    source, target = tmp_path / "a.img", tmp_path / "b.img"
    with source.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(5 << 20)
        file.write(b"x" * 65536)
    assert 65536 <= disk.copy(source, target) < 1 << 20
    assert target.stat().st_size == 1 << 30
    subprocess.run(["cmp", source, target], check=True)
    target.unlink()
    with pytest.raises(disk.LocalCloudError, match="cannot be copied"):
        disk.copy(tmp_path / "none.img", target)
    assert list(tmp_path.glob("b*")) == []
