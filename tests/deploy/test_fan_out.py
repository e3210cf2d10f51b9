"""Copying a finished folder from the head: the deploy's own shell, with a local stand-in for ssh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy import fan_out, node_files

STAMP = "stamp.json"
# `ssh HOST COMMAND...`: runs the command here on the head's folder, through one more shell as sshd does.
SSH_STAND_IN = """#!/bin/sh
while [ "$1" != te1 ]; do shift; done
shift
exec sh -c "$(echo "$*" | sed s#/node/#/head/#g)"
"""


class Cluster:
    """A head's folder and a receiver's, on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ssh = root / "ssh"
        self.ssh.write_text(SSH_STAND_IN)
        self.ssh.chmod(0o755)
        self.here = root / "node/data/env"
        self.head = root / "head/data/env"
        (self.head / "bin").mkdir(parents=True)
        (self.head / "bin/python").write_bytes(b"elf" * 100_000)
        (self.head / "bin/python3").symlink_to("python")

    def seal(self, **facts: str) -> str:
        command = fan_out.manifest_command("seal", str(self.head), STAMP, *(f"{k}={v}" for k, v in facts.items()))
        subprocess.run(["sh", "-c", command], check=True)
        return fan_out.parse_state(self._run(fan_out.state_command(str(self.head), STAMP, "none")).splitlines())[
            "stamp"
        ]["hash"]

    def pull(self, wanted_hash: str = "") -> None:
        """Every command in turn, as pyinfra would, up to the first that fails."""
        shell = f"{self.ssh} -o BatchMode=yes"
        for command in fan_out.pull_commands(str(self.here), STAMP, "te1", wanted_hash, shell):
            self._run(command)

    def _run(self, command: str) -> str:
        environment = {**os.environ, "PATH": f"{self.root}:{os.environ['PATH']}"}
        done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(done.stderr)
        return done.stdout

    def files(self, folder: Path) -> dict[str, bytes | str]:
        return {
            str(p.relative_to(folder)): str(p.readlink()) if p.is_symlink() else p.read_bytes()
            for p in folder.rglob("*")
            if p.is_symlink() or p.is_file()
        }


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_copy_is_the_heads_folder_and_stamped(cluster: Cluster) -> None:
    digest = cluster.seal()
    cluster.pull(digest)
    assert cluster.files(cluster.here) == cluster.files(cluster.head)
    state = fan_out.parse_state(cluster._run(fan_out.state_command(str(cluster.here), STAMP, "verify")).splitlines())
    assert fan_out.same_as_source(state, digest)


def test_a_copy_drops_what_the_head_no_longer_has(cluster: Cluster) -> None:
    cluster.seal()
    cluster.pull()
    (cluster.here / "old").write_text("")
    (cluster.head / "bin/new").write_text("1")
    cluster.pull(cluster.seal())
    assert cluster.files(cluster.here) == cluster.files(cluster.head)


def test_a_head_without_a_finished_folder_is_refused_with_the_reason(cluster: Cluster) -> None:
    with pytest.raises(AssertionError, match=r"te1 has no finished .*/data/env to copy"):
        cluster.pull()
    assert not cluster.here.exists()


def test_a_head_with_another_build_is_refused_and_the_old_copy_stays(cluster: Cluster) -> None:
    digest = cluster.seal()
    cluster.pull(digest)
    with pytest.raises(AssertionError, match="te1 has no finished"):
        cluster.pull("0" * 64)
    assert (cluster.here / STAMP).exists()


def test_a_file_that_only_looks_the_same_is_found_and_replaced(cluster: Cluster) -> None:
    cluster.pull(cluster.seal())
    python = cluster.here / "bin/python"
    times = python.stat()
    python.write_bytes(b"elF" * 100_000)
    os.utime(python, ns=(times.st_atime_ns, times.st_mtime_ns))
    cluster.pull()
    assert python.read_bytes() == b"elf" * 100_000


def test_what_cannot_be_verified_gets_no_stamp(cluster: Cluster) -> None:
    cluster.seal()
    (cluster.head / "bin/python").write_bytes(b"changed after sealing")
    with pytest.raises(AssertionError, match="bin/python is not the file it was"):
        cluster.pull()
    assert not (cluster.here / STAMP).exists()


def test_a_broken_copy_is_taken_up_again(cluster: Cluster) -> None:
    digest = cluster.seal()
    (cluster.here / "bin").mkdir(parents=True)
    (cluster.here / "bin/python").write_bytes(b"elf" * 50_000)
    cluster.pull(digest)
    assert cluster.files(cluster.here) == cluster.files(cluster.head)


def test_a_lost_connection_is_tried_again(cluster: Cluster) -> None:
    digest = cluster.seal()
    # rsync, and only rsync, loses its first connection
    lost = cluster.root / "lost"
    once = f'case "$*" in *--server*) [ -e {lost} ] || {{ touch {lost}; exit 255; }};; esac\n'
    cluster.ssh.write_text(SSH_STAND_IN.replace("\n", f"\n{once}", 1))
    (cluster.root / "sleep").write_text("#!/bin/sh\n")
    (cluster.root / "sleep").chmod(0o755)
    cluster.pull(digest)
    assert lost.exists()
    assert cluster.files(cluster.here) == cluster.files(cluster.head)


def test_nothing_is_written_where_data_is_no_mount_point(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", node_files.refuse_unless_mounted(str(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr == f"{tmp_path} is not a mounted disk; nothing is written there\n"
    assert subprocess.run(["sh", "-c", node_files.refuse_unless_mounted("/proc")], check=False).returncode == 0


def test_a_folder_that_is_not_there_has_an_empty_state(tmp_path: Path) -> None:
    out = subprocess.run(
        ["sh", "-c", fan_out.state_command(str(tmp_path / "no"), STAMP, "check")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    state = fan_out.parse_state(out.splitlines())
    assert state == {"stamp": {}, "problems": [], "source": {}}
    assert not fan_out.same_as_source(state)


def test_a_copy_is_current_only_while_it_equals_the_source() -> None:
    state = {"stamp": {"hash": "1"}, "problems": [], "source": {"hash": "1"}}
    assert fan_out.same_as_source(state)
    assert not fan_out.same_as_source({**state, "source": {"hash": "2"}})
    assert not fan_out.same_as_source({**state, "source": {}})
    assert not fan_out.same_as_source({**state, "problems": ["x is missing"]})
    assert fan_out.same_as_source({**state, "source": {}}, "1")
