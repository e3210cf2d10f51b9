"""Packages: first-boot work is waited for, and a mirror that is taken away leaves the sources as they were."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.node_files import FOLDER
from deploy.on_node.probe import SPOT_WATCH
from deploy.packages import LISTS_LOCK, UPDATE, packages_for, through_mirror, without_mirror
from inventory.settings import Settings
from tests.support.fake_nodes import NODE, deploy
from tests.support.waiting import until
from training.run.events import RUN_VARIABLE
from training.run.folder import unit_of

REPOSITORY = Path(__file__).parents[2]
ORIGINALS = {
    "etc/apt/sources.list": "# its own\ndeb http://archive.ubuntu.com/ubuntu jammy main\n\ndeb http://x.example/y /\n"
    "deb http://security.ubuntu.com/ubuntu jammy-security main\n",
    "etc/apt/sources.list.d/debian.sources": "Types: deb\nURIs: http://ftp.debian.org/debian\nSuites: bookworm\n",
    "etc/apt/sources.list.d/sources.list": "deb http://security.ubuntu.com/ubuntu jammy-security main\n",
    "etc/apt/sources.list.d/debian.list": "deb mirror+file:///etc/apt/mirrors/debian.list bookworm main\n",
    "etc/apt/mirrors/debian.list": "https://ftp.debian.org/debian\n",
}
# A root of links and read-only binds of this machine's programs, with an /etc of its own.
ROOT = """
set -e
root=$1; shift
for d in bin sbin lib lib64 usr dev; do
  if [ -L /$d ]; then cp -P /$d $root/$d; elif [ -d /$d ]; then mkdir -p $root/$d; mount --rbind /$d $root/$d; fi
done
exec "$@"
"""


def waits(status: str) -> list[str]:
    found = deploy("deploy.packages.install_packages", {"te1": {**NODE, "cloud-init status 2>": status}})
    return [command for command in found["told"]["te1"] if "--wait" in command]


@pytest.mark.parametrize("status", ["running", "not started"])
def test_first_boot_work_is_waited_for(status: str) -> None:
    assert len(waits(status)) == 1


@pytest.mark.parametrize("status", ["done", "disabled", ""])
def test_nothing_is_waited_for_where_it_is_over_or_there_is_none(status: str) -> None:
    assert waits(status) == []


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 9), (2, 0)])
def test_first_boot_work_with_recoverable_errors_is_no_reason_to_stop(tmp_path: Path, code: int, ends: int) -> None:
    (wait,) = waits("running")
    (tmp_path / "cloud-init").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "cloud-init").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", wait], env=environment, check=False, capture_output=True, text=True)
    assert (done.returncode, "cloud-init" in done.stderr) == (ends, ends != 0)


def test_the_lock_of_the_lists_is_waited_for(tmp_path: Path) -> None:
    lock, made = tmp_path / "lock", tmp_path / "made"
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\ntouch {made}\n")
    (tmp_path / "apt-get").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with lock.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        with subprocess.Popen(["sh", "-c", UPDATE.replace(LISTS_LOCK, str(lock))], env=environment) as update:
            inode = f":{lock.stat().st_ino} "
            locks = Path("/proc/locks")
            until(lambda: [line for line in locks.read_text().splitlines() if "->" in line and inode in line], "a wait")
            assert not made.exists()
            fcntl.lockf(file, fcntl.LOCK_UN)
            assert update.wait(120) == 0 and made.exists()


@pytest.mark.parametrize("torch", ["cpu", "cuda"])
def test_where_a_driver_is_looked_up_the_archives_index_comes_first(torch: str) -> None:
    settings = {"python": {"torch": torch}}
    told = deploy("deploy.packages.install_packages", {"te1": NODE}, settings=settings)["told"]["te1"]
    update = "apt-get -q -o Acquire::Languages=none update"
    alone = [
        n
        for n, command in enumerate(told)
        if update in command and "kept.list" not in command and "if dpkg" not in command
    ]
    kept = next(n for n, command in enumerate(told) if "kept.list" in command)
    assert (alone and alone[0] < kept) if torch == "cuda" else not alone


def test_needrestart_leaves_a_runs_unit_alone_and_the_next_services_not():
    # how needrestart reads its drop-ins and asks whether a service is restarted
    program = """
        our %nrconf; my ($file, $name) = @ARGV; eval do { local (@ARGV, $/) = $file; <> }; die $@ if $@;
        for (keys %{$nrconf{override_rc}}) { exit 7 if $name =~ /$_/ and !$nrconf{override_rc}{$_} }
    """
    conf = str(FOLDER / "needrestart.conf")
    units = [f"{unit_of('tiny-20260101-000000')}.service", SPOT_WATCH, "nvidia-persistenced.service"]
    codes = [subprocess.run(["perl", "-e", program, conf, unit], check=False).returncode for unit in units]
    assert codes == [7, 7, 0]


@pytest.mark.parametrize(("variable", "code"), [(RUN_VARIABLE, 1), (f"NO_{RUN_VARIABLE}", 0)])
def test_an_unattended_upgrade_waits_for_the_processes_of_a_run(tmp_path: Path, variable: str, code: int) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/environ").write_bytes(f"HOME=/root\0{variable}=/data/runs/x\0".encode())
    (tmp_path / "8").mkdir()  # one that has ended
    conf = (FOLDER / "apt_daily_upgrade.conf").read_text().replace("/proc/", f"{tmp_path}/")
    argv = shlex.split(conf.partition("ExecCondition=")[2])
    assert subprocess.run(argv, check=False).returncode == code


def set_mirror(tmp_path: Path, mirror: str) -> int:
    """Deploy apt's sources into the root below tmp_path; how many operations changed something."""
    root = tmp_path / "root"
    (tmp_path / "hosts.py").write_text(f"nodes = ['@chroot/{str(root).lstrip('/')}']\n")
    (tmp_path / "do.py").write_text(
        f"from deploy.packages import set_apt_mirror\n\nset_apt_mirror(mirror={mirror!r})\n"
    )
    command = [sys.executable, "-m", "pyinfra", "-y", "--json", str(tmp_path / "hosts.py"), str(tmp_path / "do.py")]
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", ROOT, "sh", str(root), *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    (operation,) = json.loads(done.stdout)["results"]["operations"]
    return len(operation["success"])


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A root whose /etc/apt has the sources in ORIGINALS."""
    root = tmp_path / "root"
    for path, text in ORIGINALS.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for name in ("tmp", "var/lib"):
        (root / name).mkdir(parents=True)
    return root


def texts(root: Path) -> dict[str, str]:
    return {path: (root / path).read_text() for path in ORIGINALS}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (chroot and mounts)")
def test_a_mirror_is_set_once_and_taken_away_again(tmp_path: Path, sources: Path) -> None:
    assert set_mirror(tmp_path, "") == 0
    assert set_mirror(tmp_path, "http://10.0.0.5:8081") == 1
    assert "http://10.0.0.5:8081/ubuntu jammy" in texts(sources)["etc/apt/sources.list"]
    assert "http://10.0.0.5:8081/debian\n" in texts(sources)["etc/apt/sources.list.d/debian.sources"]
    assert set_mirror(tmp_path, "http://10.0.0.5:8081") == 0
    assert set_mirror(tmp_path, "https://mirror.example/") == 1
    assert not [path for path, text in texts(sources).items() if "10.0.0.5" in text or "example//" in text]
    assert set_mirror(tmp_path, "") == 1
    assert texts(sources) == ORIGINALS
    assert set_mirror(tmp_path, "") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (chroot and mounts)")
def test_what_an_admin_changes_after_a_mirror_was_set_stays(tmp_path: Path, sources: Path) -> None:
    def changed(text: str) -> str:
        return text.replace("jammy", "noble").replace("Suites: bookworm", "Suites: bookworm trixie") + "# a note\n"

    set_mirror(tmp_path, "http://10.0.0.5:8081")
    mirrored = {path: changed(text) for path, text in texts(sources).items()}
    for path, text in mirrored.items():
        (sources / path).write_text(text)
    assert set_mirror(tmp_path, "http://10.0.0.5:8081") == 0
    assert texts(sources) == mirrored
    set_mirror(tmp_path, "")
    assert texts(sources) == {path: changed(text) for path, text in ORIGINALS.items()}
    saved = {path: sources / "var/lib/spotune/apt-sources" / path for path in ORIGINALS}
    assert {path: file.read_text() for path, file in saved.items() if file.exists()} == {
        path: text for path, text in ORIGINALS.items() if "mirror+file" not in text
    }


@pytest.mark.parametrize(
    ("torch", "provider", "there"),
    [
        ("cuda", "conda", {"build-essential"}),
        ("cuda", "venv", {"build-essential", "python3-dev", "python3-venv"}),
        ("cpu", "venv", {"python3-venv"}),
        ("cpu", "conda", set()),
    ],
)
def test_compilers_are_asked_for_only_where_something_is_compiled(torch, provider, there):
    asked = set(packages_for(Settings(python={"torch": torch, "provider": provider})))
    assert asked & {"build-essential", "python3-dev", "python3-venv"} == there
    assert {"pdsh", "ninja-build", "rsync"} <= asked


MIRROR = "https://mirrors.aliyun.com"


def test_the_distributions_archives_go_through_the_mirror():
    text = "deb http://archive.ubuntu.com/ubuntu jammy main\ndeb http://security.ubuntu.com/ubuntu/ jammy main\n"
    assert through_mirror(text, MIRROR) == (f"deb {MIRROR}/ubuntu jammy main\ndeb {MIRROR}/ubuntu/ jammy main\n")


def test_deb822_sources_and_the_security_archive_too():
    text = "URIs: http://ftp.debian.org/debian\nURIs: https://security.debian.org/debian-security\n"
    assert through_mirror(text, MIRROR + "/") == f"URIs: {MIRROR}/debian\nURIs: {MIRROR}/debian-security\n"


def test_other_repositories_and_comments_stay():
    text = "# deb http://archive.ubuntu.com/ubuntu x\ndeb http://nvidia.example/cuda/repos/ubuntu2204/x86_64/ /\n"
    assert through_mirror(text, MIRROR) == text


CN, SECURITY = "http://cn.archive.ubuntu.com/ubuntu", "http://security.ubuntu.com/ubuntu"
LINES = f"deb {CN} noble main\ndeb {CN} noble universe\ndeb {SECURITY}/ noble-security main\n"
PARAGRAPHS = f"Types: deb\nURIs: {CN}\nSuites: noble noble-updates\n\nSuites:\n noble-security\nURIs: {SECURITY}\n"


@pytest.mark.parametrize(
    ("first", "added"),
    [
        (LINES, "deb {} noble-backports main\n"),
        (LINES, "deb [signed-by=/a.gpg] {} noble restricted\n# deb\n"),
        (PARAGRAPHS, "Types: deb\nURIs: {}\nSuites: noble-backports noble-updates\n\n"),
    ],
)
def test_each_archive_goes_back_to_where_its_suite_was(first, added):
    mirrored = added.format(f"{MIRROR}/ubuntu") + through_mirror(first, MIRROR)
    assert without_mirror(mirrored, first, [MIRROR]) == added.format(CN) + first


@pytest.mark.parametrize("host", ["de.archive.ubuntu.com", "mirrors.cloud.aliyuncs.com", "mirror.corp.example:8080"])
def test_whoever_serves_the_distributions_archives(host):
    told = through_mirror(f"URIs: http://{host}/ubuntu/ http://{host}/ubuntu", MIRROR)
    assert told == f"URIs: {MIRROR}/ubuntu/ {MIRROR}/ubuntu"


@pytest.mark.parametrize(
    "place",
    [
        "packages.microsoft.com/ubuntu/22.04/prod",
        "repos.influxdata.com/debian",
        "archive.canonical.com/ubuntu",
        "apt.corp.example/ubuntu/internal",
        "ppa.launchpadcontent.net/deadsnakes/ppa/ubuntu",
        "mirror.corp.example/ubuntu/internal",
        "ports.ubuntu.com/ubuntu-ports",
        "esm.ubuntu.com/apps/ubuntu",
    ],
)
def test_another_vendors_repository_stays(place):
    for line in (f"deb [arch=amd64] https://{place} jammy main", f"URIs: https://{place}/"):
        assert through_mirror(line, MIRROR) == line


def test_doing_it_twice_changes_nothing():
    once = through_mirror("deb http://archive.ubuntu.com/ubuntu jammy main\n", MIRROR)
    assert through_mirror(once, MIRROR) == once
