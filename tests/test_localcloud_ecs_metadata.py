"""The metadata service as its clients see it, what user data does, and the tables of a host's disks."""

import base64
import email.mime.multipart
import email.mime.text
import gzip
import io
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from inventory.localcloud import blocks, disk
from inventory.localcloud.ecs import due, metadata
from inventory.localcloud.image_files import user_data
from inventory.localcloud.mounts import mounts_of
from tests.rented_on_paper import PaperCloud

TOKEN = "X-aliyun-ecs-metadata-token"


@pytest.fixture
def cloud(tmp_path):
    return PaperCloud(tmp_path)


@pytest.fixture
def service(cloud):
    """The service on loopback; the machine whose address is 127.0.0.1 asks."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    each = metadata.Service(cloud.cloud)
    each.listen(sock)
    each.base = f"http://127.0.0.1:{sock.getsockname()[1]}/latest"
    yield each
    each.stop()


def machine(cloud, **flat):
    (instance_id,) = cloud.run(SpotStrategy="SpotAsPriceGo", **flat)
    cloud.cloud.world.instances[instance_id].address = "127.0.0.1"
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
    assert ask(f"{service.base}/meta-data/")[0] == 404
    instance_id = machine(cloud, InternetMaxBandwidthOut=5)
    assert ask(f"{service.base}/meta-data/instance-id") == (200, instance_id)
    listing = ask(f"{service.base}/meta-data/")[1]
    assert {"instance-id", "instance/", "public-keys/", "eipv4", "zone-id"} <= set(listing.split("\n"))
    assert ask(f"{service.base}/meta-data/public-keys/0/openssh-key") == (200, "ssh-ed25519 AAAA\n")
    assert ask(f"{service.base}/meta-data/nothing")[0] == 404
    assert ask(f"{service.base}/user-data")[0] == 404


def test_the_notice_is_not_there_until_the_machine_is_reclaimed(cloud, service):
    instance_id, path = machine(cloud), f"{service.base}/meta-data/instance/spot/termination-time"
    assert ask(path)[0] == 404
    due.reclaim(cloud.cloud, instance_id, 300)
    status, told = ask(path)
    ends = time.mktime(time.strptime(told, "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    assert status == 200
    assert 290 < ends - cloud.cloud.now() <= 301


def test_tokens_are_needed_where_asked_for_live_as_long_as_told_and_are_the_machines_own(cloud, service):
    first = machine(cloud, HttpTokens="required", UserData=base64.b64encode(b"#!/bin/sh\n").decode())
    path = f"{service.base}/user-data"
    assert ask(path)[0] == 403
    assert [token_of(service, seconds)[0] for seconds in ("0", "21601", "x", "1", "21600")] == [400, 400, 400, 200, 200]
    _, token = token_of(service, "1")
    assert ask(path, **{TOKEN: token}) == (200, "#!/bin/sh\n")
    assert ask(path, **{TOKEN: "another"})[0] == 401
    cloud.cloud.world.instances[first].address = "10.0.0.1"
    machine(cloud)
    assert ask(path, **{TOKEN: token})[0] == 401
    cloud.cloud.world.instances[first].address = "127.0.0.1"
    time.sleep(1.1)
    assert ask(path, **{TOKEN: token})[0] == 401


def test_user_data_comes_plain_packed_or_in_parts():
    assert list(user_data.parts(b"#!/bin/sh\n")) == [b"#!/bin/sh\n"]
    assert list(user_data.parts(gzip.compress(b"#cloud-config\n"))) == [b"#cloud-config\n"]
    archive = email.mime.multipart.MIMEMultipart()
    archive.attach(email.mime.text.MIMEText("#cloud-config\nhostname: a\n", "cloud-config"))
    archive.attach(email.mime.text.MIMEText("#!/bin/sh\ntrue\n", "x-shellscript"))
    assert list(user_data.parts(archive.as_bytes())) == [b"#cloud-config\nhostname: a\n", b"#!/bin/sh\ntrue\n"]


def test_cloud_config_writes_files_keys_and_runs_commands(tmp_path, monkeypatch):
    keys, ran, told = tmp_path / "ssh/authorized_keys", tmp_path / "ran", tmp_path / "etc/told"
    monkeypatch.setattr(user_data, "AUTHORIZED_KEYS", keys)
    keys.parent.mkdir()
    keys.write_text("ssh-ed25519 first\n")
    config = {
        "ssh_authorized_keys": ["ssh-ed25519 first", "ssh-ed25519 second"],
        "write_files": [
            {"path": str(told), "content": base64.b64encode(b"one\n").decode(), "encoding": "b64"},
            {"path": str(told), "content": "two\n", "append": True, "permissions": "0600"},
        ],
        "runcmd": [f"echo shell >{ran}", ["sh", "-c", f"echo list >>{ran}"], "exit 3", ["/no/such"]],
    }
    log = io.FileIO(tmp_path / "log", "w")
    assert [user_data.run(each, log) for each in user_data.apply(config)] == [True, True, False, False]
    assert keys.read_text().splitlines() == ["ssh-ed25519 first", "ssh-ed25519 second"]
    assert (told.read_text(), told.stat().st_mode & 0o777) == ("one\ntwo\n", 0o600)
    assert ran.read_text() == "shell\nlist\n"
    assert "/no/such" in (tmp_path / "log").read_text()


def test_a_script_runs_and_leaves_its_words_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(user_data, "STATE", tmp_path / "state")
    log = io.FileIO(tmp_path / "log", "w")
    assert user_data.act(b"#!/bin/sh\necho hello; echo trouble >&2\n", log)
    assert user_data.act(b"#!/bin/sh\nexit 1\n", log) is False
    assert (tmp_path / "log").read_text() == "hello\ntrouble\n"


def test_disks_that_stay_keep_their_names_when_others_come_and_go():
    before = disk.table([("loop1", "a"), ("loop2", "b")])
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
    assert 65536 <= blocks.copy(source, target) < 1 << 20
    assert target.stat().st_size == 1 << 30
    subprocess.run(["cmp", source, target], check=True)
    target.unlink()
    with pytest.raises(blocks.LocalCloudError, match="cannot be copied"):
        blocks.copy(tmp_path / "none.img", target)
    assert list(tmp_path.glob("b*")) == []


def test_the_listing_of_a_folder_names_folders_with_a_slash():
    of = {"b": "text", "a": {"c": "x"}}
    assert metadata.text(of, "") == metadata.text(of, "/") == "a/\nb"
    assert metadata.text(of, "/a/c") == "x"
    assert metadata.text(of, "/b/c") is None
