"""Packages that lie on the data disk are installed from there, and the archive is asked only for what lacks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.on_node.keep_packages import installed, is_of, keep, release
from deploy.packages import install_commands

pytestmark = pytest.mark.skipif(not (shutil.which("apt-get") and shutil.which("dpkg-deb")), reason="needs apt and dpkg")
NAME, ARCH = "spotune-told", "all"


def shell(command, cwd, **env):
    return subprocess.run(
        ["sh", "-c", command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=True
    ).stdout


def packed(folder, version):
    """A package of ours, in the file as apt calls it."""
    tree = folder / "tree"
    (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
    fields = f"Package: {NAME}\nVersion: {version}\nArchitecture: {ARCH}\nMaintainer: x <x@x.example>\nDescription: x\n"
    (tree / "DEBIAN/control").write_text(fields)
    (tree / "version").write_text(version)
    file = folder / f"{NAME}_{version.replace(':', '%3a')}_{ARCH}.deb"
    shell(f"dpkg-deb --root-owner-group --build tree '{file}'", folder)
    return file


class Machine:
    """A root of its own for apt and dpkg, with an archive that may be asked and a data disk."""

    def __init__(self, folder):
        self.folder, self.root = folder, folder / "root"
        self.asked = folder / "asked"
        for each in ("archives/partial", "lists/partial", "dpkg/info", "dpkg/updates", "disk"):
            (self.root / each).mkdir(parents=True)
        (self.root / "dpkg/status").touch()
        (self.root / "sources.list").touch()
        dpkg = (
            f'"--admindir={self.root}/dpkg"; "--instdir={self.root}/disk"; "--force-not-root"; "--log={self.root}/log";'
        )
        (folder / "apt.conf").write_text(
            f'Dir::State::status "{self.root}/dpkg/status";\nDir::State::lists "{self.root}/lists";\n'
            f'Dir::State::extended_states "{self.root}/extended";\nDir::Log "{self.root}";\n'
            f'Dir::Cache "{self.root}";\nDir::Cache::archives "{self.root}/archives";\n'
            f'Dir::Etc::sourcelist "{self.root}/sources.list";\nDir::Etc::sourceparts "-";\n'
            f'DPkg::Options {{ {dpkg} }};\nAPT::Sandbox::User "root";\n'
        )
        arch = shell("dpkg --print-architecture", folder).strip()
        self.kept = folder / "data" / f"{release(Path('/etc/os-release').read_text())}-{arch}"

    def run(self, command):
        ours = {"APT_CONFIG": str(self.folder / "apt.conf"), "DPKG_ADMINDIR": str(self.root / "dpkg")}
        return shell(command, self.folder, **ours)

    def keep(self, version):
        """What a snapshot brings along, made as it is made on the head."""
        file = packed(self.folder, version)
        keep(self.kept, self.folder, {(NAME, version, ARCH)})
        return self.kept / "archives" / file.name

    def install(self, name=NAME):
        """Whether the archive was asked for its index."""
        kept, archive = install_commands([name], f"touch {self.asked}; false", str(self.folder / "data"))
        self.run(kept)
        self.run(f"{archive} || true")
        return self.asked.exists()

    @property
    def version(self):
        file = self.root / "disk/version"
        return file.read_text() if file.exists() else None


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("version", ["1.0", "1:2.0-1", "2.0+dfsg~1-1"])
def test_a_kept_package_is_installed_and_no_archive_is_asked(machine, version):
    machine.keep(version)
    assert not machine.install()
    assert machine.version == version


def test_one_that_was_changed_on_the_disk_is_not_installed_though_it_has_the_right_size(machine):
    there = machine.keep("1.0")
    blob = bytearray(there.read_bytes())
    blob[-1] ^= 1
    there.write_bytes(blob)
    assert machine.install() and machine.version is None


@pytest.mark.parametrize("kept", [None, "1.0"], ids=["nothing is kept", "another package is"])
def test_what_is_not_kept_is_asked_of_the_archive(machine, kept):
    if kept:
        machine.keep(kept)
    assert machine.install("spotune-other") and machine.version is None


def test_a_package_that_is_installed_is_not_asked_for_again(machine):
    machine.keep("1.0")
    machine.install()
    shutil.rmtree(machine.kept)
    assert not machine.install()


def test_a_package_that_was_cut_short_is_dropped_and_does_not_stop_a_snapshot(machine):
    there = machine.keep("1.0")
    there.write_bytes(there.read_bytes()[:10])
    assert keep(machine.kept, machine.folder / "archive", {(NAME, "1.0", ARCH)}) == {"packages": 0, "bytes": 0}
    assert list((machine.kept / "archives").iterdir()) == [] and (machine.kept / "Packages").read_text() == ""


def test_the_program_runs_on_the_oldest_python_a_node_may_have():
    source = (Path(__file__).parents[2] / "deploy/on_node/keep_packages.py").read_text()
    assert "file_digest" not in source and "tomllib" not in source, "Ubuntu 22.04 has Python 3.10"


def test_kept_is_what_is_installed_and_nothing_that_was_replaced(machine):
    place, fetched = machine.kept, machine.folder
    old, new = packed(fetched, "1.0"), packed(fetched, "1:2.0")
    assert keep(place, fetched, {(NAME, "1.0", ARCH)}) == {"packages": 1, "bytes": old.stat().st_size}
    assert keep(place, fetched, {(NAME, "1:2.0", ARCH)}) == {"packages": 1, "bytes": new.stat().st_size}
    there = sorted(str(file.relative_to(place)) for file in place.rglob("*"))
    assert there == ["Packages", "archives", f"archives/{new.name}"]
    assert "Version: 1:2.0\n" in (place / "Packages").read_text() and "1.0\n" not in (place / "Packages").read_text()
    assert installed() and is_of(new, {(NAME, "1:2.0", ARCH)})
