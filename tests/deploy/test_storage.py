"""The data disk on real loop devices: the very shell the deploy sends runs in a root of its own.

Each test has a node's root folder (an overlay over this machine's, in a private mount namespace) with its own
/dev, where a loop device appears as /dev/vdb under a serial, as on a cloud.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.disk_plan import LIST_DISKS, DiskPlan, format_command, inspect_command, parse_disk, parse_disks, plan_disk
from deploy.node_files import refuse_unless_mounted
from tests.support.skips import RESIZE
from training.run.notices import RECORD, DiskRecord, parse_record, record_text

MIB = 2**20
SERIAL = "bp1test0000000000001"
LINK = f"/dev/disk/by-id/virtio-{SERIAL}"
REPOSITORY = Path(__file__).parents[2]

SET_UP = """
set -e
mount -t tmpfs tmpfs "$1"; cd "$1"; mkdir up work root
mknod up/data c 0 0  # hides this machine's own /data, if it has one
mount -t overlay overlay -o lowerdir=/,upperdir=up,workdir=work root
mount -t tmpfs tmpfs root/dev; mount --rbind /proc root/proc; mount --rbind /sys root/sys
mount -t tmpfs tmpfs root/run
mknod -m 666 root/dev/null c 1 3; mknod -m 666 root/dev/zero c 1 5; mknod -m 666 root/dev/urandom c 1 9
mkdir -p root/dev/disk/by-id root/dev/kernel; mount -t devtmpfs devtmpfs root/dev/kernel
 ln -s /proc/self/fd root/dev/fd
printf '# system\\nLABEL=root / ext4 defaults 0 1\\n' > root/etc/fstab
echo ready; exec sleep 600
"""


def _missing() -> str:
    """Why these tests cannot run here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root (loop devices and mounts)"
    if not Path("/dev/loop-control").exists():
        return "needs loop devices"
    tools = ("unshare", "nsenter", "losetup", "blkid", "mkfs.ext4", "sfdisk")
    lacking = [tool for tool in tools if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"needs {', '.join(lacking)} (packages e2fsprogs, fdisk, util-linux)" if lacking else ""


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "-")
needs_xfs = pytest.mark.skipif(shutil.which("mkfs.xfs", path="/usr/sbin:/sbin") is None, reason="needs xfsprogs")
needs_growpart = pytest.mark.skipif(shutil.which("growpart") is None, reason="needs cloud-guest-utils")


@dataclass
class FakeNode:
    """A root folder in its own mount namespace, with one loop device as its data disk."""

    folder: Path
    process: subprocess.Popen[str]
    image: Path
    loops: list[str] = field(default_factory=list)

    def inside(self, *argv: str) -> list[str]:
        return ["nsenter", "-m", "-t", str(self.process.pid), *argv]

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        root = str(self.folder / "root")
        return subprocess.run(
            self.inside("chroot", root, "sh", "-c", command), capture_output=True, text=True, check=False
        )

    def must(self, command: str) -> str:
        result = self.run(command)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def attach(self, image: Path) -> str:
        """The image as the node's /dev/vdb, with the partitions it has; returns its loop device."""
        loop = subprocess.check_output(["losetup", "-f", "--show", str(image)], text=True).strip()
        self.loops.append(loop)
        # Fails on a disk without a table; and some kernels read no tables by themselves.
        subprocess.run(["partx", "-u", loop], check=False, capture_output=True)
        self._node(Path(loop), "vdb", LINK)
        for partition in sorted(Path("/dev").glob(f"{Path(loop).name}p*")):
            index = partition.name.rpartition("p")[2]
            self._node(partition, f"vdb{index}", f"{LINK}-part{index}")
        return loop

    def _node(self, device: Path, name: str, link: str) -> None:
        number = device.stat().st_rdev
        major, minor = os.major(number), os.minor(number)
        self.must(f"mknod /dev/{name} b {major} {minor} && ln -s ../../{name} {link}")

    def plan(self, filesystem: str = "ext4", may_format: bool = True) -> DiskPlan:
        disks = parse_disks(self.must(LIST_DISKS).splitlines())
        facts = parse_disk(self.must(inspect_command(LINK)).splitlines())
        return plan_disk(facts, disks, filesystem, may_format)

    def apply(self, plan: DiskPlan) -> None:
        assert plan.refusal == ""
        for command in plan.commands:
            self.must(command)

    def close(self) -> None:
        self.run("umount /data")
        for loop in self.loops:
            subprocess.run(["partx", "-d", loop], check=False, capture_output=True)
            subprocess.run(["losetup", "-d", loop], check=False)
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    folder = tmp_path / "node"
    folder.mkdir()
    process = subprocess.Popen(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", SET_UP, "sh", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        pytest.skip("this kernel allows no overlay in a private mount namespace")
    fake = FakeNode(folder, process, tmp_path / "disk.img")
    try:
        yield fake
    finally:
        fake.close()


def blank(path: Path, mib: int = 400) -> Path:
    with path.open("wb") as file:
        file.truncate(mib * MIB)
    return path


def noise(path: Path, at: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(random.Random(7).randbytes(size))


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tool(*argv: str, stdin: str | None = None) -> None:
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(argv, input=stdin, check=True, capture_output=True, text=True, env=environment)


def partitioned(path: Path, table: str, mib: int = 400) -> Path:
    """An image with a partition table as sfdisk reads it."""
    tool("sfdisk", "-q", str(blank(path, mib)), stdin=table)
    return path


def test_a_blank_disk_is_formatted_and_mounted_and_the_second_plan_is_empty(node: FakeNode) -> None:
    node.attach(blank(node.image))
    node.apply(node.plan())
    assert node.must("findmnt -no FSTYPE,LABEL /data").split() == ["ext4", "spotune-data"]
    assert node.must("cat /etc/fstab").splitlines() == [
        "# system",
        "LABEL=root / ext4 defaults 0 1",
        f"{LINK} /data ext4 defaults,nofail,x-systemd.device-timeout=30s 0 2",
    ]
    assert node.plan() == DiskPlan()
    node.must(f"umount /data && mount /data && {refuse_unless_mounted()}")


@needs_xfs
def test_a_blank_disk_becomes_xfs_where_the_settings_say_so(node: FakeNode) -> None:
    node.attach(blank(node.image))
    node.apply(node.plan("xfs"))
    assert node.must("findmnt -no FSTYPE /data").strip() == "xfs"
    assert node.plan("xfs") == DiskPlan()
    assert node.plan("ext4") == DiskPlan(), "an existing filesystem stays what it is"


def lvm(path: Path) -> None:
    """A physical volume's label as pvcreate writes it into the second sector (struct label_header)."""
    header = b"LABELONE" + (1).to_bytes(8, "little")
    body = (32).to_bytes(4, "little") + b"LVM2 001" + b"abcdefghijklmnopqrstuvwxyz012345" + bytes(512)
    body = body[: 512 - 20]
    crc = lvm_crc(body)
    with path.open("r+b") as file:
        file.seek(512)
        file.write(header + crc.to_bytes(4, "little") + body)


def lvm_crc(data: bytes) -> int:
    """LVM's crc: the usual polynomial with its own initial value, not inverted at the end."""
    crc = 0xF597A6CF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    return crc


def foreign_disk(kind: str, path: Path) -> None:
    """An image of 80 MiB that holds what must never be formatted."""
    blank(path, 80)
    match kind:
        case "4 MiB of random bytes":
            noise(path, 0, 4 * MIB)
        case "one byte at the end of the first 4 MiB":
            noise(path, 4 * MIB - 1, 1)
        case "random bytes in the last MiB":
            noise(path, 80 * MIB - 4096, 4096)
        case "random bytes in the middle":
            noise(path, 36 * MIB, 8 * MIB)
        case "LVM":
            lvm(path)
        case "swap":
            tool("mkswap", str(path))
        case "ext4 whose start was wiped":
            tool("mkfs.ext4", "-q", "-F", str(path))
            with path.open("r+b") as file:
                file.write(bytes(4 * MIB))
        case "an empty gpt":
            partitioned(path, "label: gpt\n", 80)
        case "an empty dos table":
            partitioned(path, "label: dos\n", 80)
        case "two partitions":
            partitioned(path, "label: gpt\nsize=20M\nsize=20M\n", 80)
        case "a partition with random bytes":
            partitioned(path, "label: gpt\nstart=8M, size=20M\n", 80)
            noise(path, 8 * MIB, MIB)


FOREIGN = {
    "4 MiB of random bytes": "in its first 4 MiB",
    "one byte at the end of the first 4 MiB": "in its first 4 MiB",
    "random bytes in the last MiB": "in its last 1 MiB",
    "random bytes in the middle": "MiB into it",
    "LVM": "LVM2_member",
    "swap": "it holds swap",
    "ext4 whose start was wiped": "MiB into it",
    "an empty gpt": "it has a gpt partition table",
    "an empty dos table": "it has a dos partition table",
    "two partitions": "table with partitions (1: unknown, 2: unknown)",
    "a partition with random bytes": "table with partitions (1: unknown)",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_disk_that_holds_something_is_refused_by_name_and_left_as_it_is(node: FakeNode, kind: str) -> None:
    foreign_disk(kind, node.image)
    before = digest(node.image)
    loop = node.attach(node.image)
    plan = node.plan()
    assert plan.commands == ()
    assert FOREIGN[kind] in plan.refusal
    assert LINK in plan.refusal
    forced = node.run(format_command(LINK, "ext4"))
    assert forced.returncode == 9, "the formatting command itself must refuse too"
    assert LINK in forced.stderr
    with Path(loop).open("rb") as device:
        os.fsync(device)
    assert digest(node.image) == before


def test_bytes_that_appear_between_plan_and_format_stop_the_format(node: FakeNode) -> None:
    loop = node.attach(blank(node.image))
    plan = node.plan()
    noise(Path(loop), 3 * MIB, 512)
    result = node.run(plan.commands[0])
    assert result.returncode == 9
    assert "in its first 4 MiB" in result.stderr
    assert node.must("blkid -p /dev/vdb; true") == ""


def test_an_existing_ext4_is_mounted_with_its_files_and_never_formatted(node: FakeNode) -> None:
    tool("mkfs.ext4", "-q", "-F", str(blank(node.image)))
    node.attach(node.image)
    node.must("mount /dev/vdb /mnt && echo kept > /mnt/file && umount /mnt")
    plan = node.plan(may_format=False)
    assert not any("mkfs" in command for command in plan.commands)
    node.apply(plan)
    assert node.must("cat /data/file") == "kept\n"
    assert node.run(format_command(LINK, "ext4")).returncode == 9
    assert node.plan() == DiskPlan()


def test_ext4_on_the_only_partition_is_mounted(node: FakeNode) -> None:
    partitioned(node.image, "label: gpt\nstart=1M\n")
    node.attach(node.image)
    node.must("mkfs.ext4 -q /dev/vdb1")
    node.apply(node.plan())
    assert node.must("findmnt -no SOURCE /data").strip() == "/dev/vdb1"
    assert f"{LINK}-part1 /data ext4" in node.must("cat /etc/fstab")
    assert node.plan() == DiskPlan()


@pytest.mark.parametrize("filesystem", ["ext4", pytest.param("xfs", marks=needs_xfs)])
def test_a_filesystem_grows_to_a_larger_disk_once(node: FakeNode, filesystem: str) -> None:
    loop = node.attach(blank(node.image))
    node.apply(node.plan(filesystem))
    node.must("echo kept > /data/file && umount /data")
    with node.image.open("r+b") as file:
        file.truncate(900 * MIB)
    tool("losetup", "-c", loop)
    node.apply(node.plan())
    size_mib = int(node.must("findmnt -bno SIZE /data")) / MIB
    assert size_mib > 750
    assert node.must("cat /data/file") == "kept\n"
    assert node.plan() == DiskPlan()


def may_resize_online() -> bool:
    """ext4 asks for CAP_SYS_RESOURCE (bit 24), which some virtual machines withhold even from root."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.split("CapEff:")[1].split()[0], 16) >> 24 & 1)


@pytest.mark.skipif(not may_resize_online(), reason=RESIZE)
def test_a_mounted_ext4_grows_online(node: FakeNode) -> None:
    loop = node.attach(blank(node.image))
    node.apply(node.plan())
    with node.image.open("r+b") as file:
        file.truncate(900 * MIB)
    tool("losetup", "-c", loop)
    node.apply(node.plan())
    assert int(node.must("findmnt -bno SIZE /data")) / MIB > 750
    assert node.plan() == DiskPlan()


@needs_growpart
def test_a_partition_grows_to_a_larger_disk_with_its_filesystem(node: FakeNode) -> None:
    partitioned(node.image, "label: gpt\nstart=1M\n")
    loop = node.attach(node.image)
    node.must("mkfs.ext4 -q /dev/vdb1")
    # growpart deletes the partition and adds it again: follow the kernel's own nodes, as udev does.
    kernel = f"../../kernel/{Path(loop).name}"
    node.must(f"ln -sf {kernel} {LINK} && ln -sf {kernel}p1 {LINK}-part1")
    with node.image.open("r+b") as file:
        file.truncate(900 * MIB)
    tool("losetup", "-c", loop)
    node.apply(node.plan())
    assert int(node.must("findmnt -bno SIZE /data")) / MIB > 750
    assert node.plan() == DiskPlan()


def test_files_under_an_unmounted_data_are_not_hidden_by_the_disk(node: FakeNode) -> None:
    node.attach(blank(node.image))
    node.must("mkdir -p /data && echo mine > /data/file")
    result = node.run(node.plan().commands[-1])
    assert result.returncode == 9
    assert "already holds files" in result.stderr


def test_a_disk_mounted_elsewhere_and_another_disk_at_data_are_refused(node: FakeNode, tmp_path: Path) -> None:
    tool("mkfs.ext4", "-q", "-F", str(blank(node.image)))
    node.attach(node.image)
    node.must("mount /dev/vdb /mnt")
    assert "is mounted at /mnt" in node.plan().refusal
    node.must("umount /mnt; mkdir -p /data; mount -t tmpfs tmpfs /data")
    assert "cannot go to /data" in node.plan().refusal


def test_a_blank_disk_is_left_blank_where_the_settings_say_never(node: FakeNode) -> None:
    node.attach(blank(node.image))
    plan = node.plan(may_format=False)
    assert plan.commands == ()
    assert 'disk.format = "never"' in plan.refusal


def test_the_guard_fails_where_data_is_not_mounted(node: FakeNode) -> None:
    result = node.run(f"{refuse_unless_mounted()}; echo written")
    assert (result.returncode, result.stdout) == (9, "")
    assert result.stderr == "/data is not a mounted disk; nothing is written there\n"


def deploy_to(node: FakeNode, tmp_path: Path, serial: str | None) -> tuple[int, list[str], str]:
    """Run the deploy by pyinfra on the fake node; its exit code, the operations that changed it, stderr."""
    host = f"@chroot/{str(node.folder / 'root').lstrip('/')}"
    (tmp_path / "hosts.py").write_text(
        "from types import SimpleNamespace\n"
        "from inventory.settings import Settings\n"
        f"nodes = [({host!r}, {{'node': SimpleNamespace(disk_serial={serial!r}), 'settings': Settings()}})]\n"
    )
    (tmp_path / "deploy_disk.py").write_text(
        "from deploy.storage import record_disk\nfrom deploy.storage import mount_data_disk\n\n"
        "mount_data_disk()\nrecord_disk()\n"
    )
    command = [sys.executable, "-m", "pyinfra", "-y", "--json", str(tmp_path / "hosts.py")]
    result = subprocess.run(
        node.inside(*command, str(tmp_path / "deploy_disk.py")),
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    operations = json.loads(result.stdout)["results"]["operations"] if result.stdout else []
    return result.returncode, [o["name"] for o in operations if o["success"]], result.stderr


def test_the_deploy_formats_once_and_changes_nothing_the_second_time(node: FakeNode, tmp_path: Path) -> None:
    node.attach(blank(node.image))
    code, first, errors = deploy_to(node, tmp_path, SERIAL)
    assert code == 0, errors
    assert node.must("findmnt -no FSTYPE /data").strip() == "ext4"
    code, second, errors = deploy_to(node, tmp_path, SERIAL)
    assert code == 0, errors
    assert (first, second) == (["Data disk | Mounted at /data", "Whose disk | Cluster and generation"], [])
    found = parse_record(node.must(f"cat /data/{RECORD}"))
    assert found == DiskRecord("spotune", (SERIAL,)) and found.generation == 1
    earlier = DiskRecord("spotune", ("bp1of-the-snapshot",))
    node.must(f"printf '%s' '{record_text(earlier)}' > /data/{RECORD}")
    code, third, errors = deploy_to(node, tmp_path, SERIAL)
    assert (code, third) == (0, ["Whose disk | Cluster and generation"]), errors
    found = parse_record(node.must(f"cat /data/{RECORD}"))
    assert found == DiskRecord("spotune", ("bp1of-the-snapshot", SERIAL)) and found.generation == 2


def test_the_deploy_ends_a_refusing_node_with_the_reason(node: FakeNode, tmp_path: Path) -> None:
    foreign_disk("LVM", node.image)
    node.attach(node.image)
    code, _, errors = deploy_to(node, tmp_path, SERIAL)
    assert code == 1
    assert "LVM2_member" in errors
    code, _, errors = deploy_to(node, tmp_path, None)
    assert code == 1
    assert f"this node has: virtio-{SERIAL}" in errors
