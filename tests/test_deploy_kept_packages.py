"""Packages that lie on the data disk are installed from there, if they are what apt's index says, and only then."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.keep_packages import installed, is_of, keep, release
from deploy.kept_packages import archives_command, lists_command

pytestmark = pytest.mark.skipif(not (shutil.which("apt-get") and shutil.which("dpkg-deb")), reason="needs apt and dpkg")
NAME, ARCH = "spotune-told", "all"


def shell(command, cwd, **env):
    return subprocess.run(
        ["sh", "-c", command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=True
    ).stdout


def packed(folder, version):
    """A package of ours, as apt names its file."""
    tree = folder / "tree"
    (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
    fields = f"Package: {NAME}\nVersion: {version}\nArchitecture: {ARCH}\nMaintainer: x <x@x.example>\nDescription: x\n"
    (tree / "DEBIAN/control").write_text(fields)
    file = folder / f"{NAME}_{version.replace(':', '%3a')}_{ARCH}.deb"
    shell(f"dpkg-deb --root-owner-group --build tree '{file}'", folder)
    return file, fields


class Machine:
    """An apt of its own, on an archive of its own, and a data disk."""

    def __init__(self, folder):
        self.folder = folder
        self.archives, self.lists = folder / "root/archives", folder / "root/lists"
        for each in (self.archives / "partial", self.lists / "partial", folder / "archive", folder / "data"):
            each.mkdir(parents=True)
        (folder / "root/status").touch()
        (folder / "root/sources.list").write_text(f"deb [trusted=yes] copy:{folder}/archive ./\n")
        (folder / "apt.conf").write_text(
            f'Dir::State::status "{folder}/root/status";\nDir::State::lists "{self.lists}";\n'
            f'Dir::Cache "{folder}/root";\nDir::Cache::archives "{self.archives}";\n'
            f'Dir::Etc::sourcelist "{folder}/root/sources.list";\nDir::Etc::sourceparts "-";\n'
            'APT::Sandbox::User "root";\n'
        )
        arch = shell("dpkg --print-architecture", folder).strip()
        self.kept = folder / "data" / f"{release(Path('/etc/os-release').read_text())}-{arch}"

    def offer(self, version):
        """What the archive has from now on."""
        file, fields = packed(self.folder, version)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        index = f"{fields}Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {digest}\n"
        shutil.copy(file, self.folder / "archive")
        (self.folder / "archive/Packages").write_text(index)
        sums = f"SHA256:\n {hashlib.sha256(index.encode()).hexdigest()} {len(index)} Packages\n"
        (self.folder / "archive/Release").write_text(f"Suite: x\n{sums}")
        return file

    def run(self, command):
        return shell(command, self.folder, APT_CONFIG=str(self.folder / "apt.conf"))

    def given(self):
        """The packages that apt has in its cache once the kept ones were looked through."""
        self.run("apt-get -qq update")
        self.run(archives_command([NAME], str(self.folder / "data"), str(self.archives)))
        return [file.name for file in self.archives.glob("*.deb")]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def kept(machine, file):
    (machine.kept / "archives").mkdir(parents=True, exist_ok=True)
    shutil.copy(file, machine.kept / "archives")
    return machine.kept / "archives" / file.name


def test_a_kept_package_that_is_what_the_index_says_is_given_to_apt(machine):
    file = machine.offer("1:2.0-1")
    kept(machine, file)
    assert machine.given() == [file.name]


def test_one_that_was_changed_on_the_disk_is_not_though_it_has_the_right_size(machine):
    there = kept(machine, machine.offer("1.0"))
    blob = bytearray(there.read_bytes())
    blob[-1] ^= 1
    there.write_bytes(blob)
    assert machine.given() == []


def test_where_the_archive_has_moved_on_its_own_is_fetched(machine):
    kept(machine, machine.offer("1.0"))
    machine.offer("2.0")
    assert machine.given() == []


def test_where_nothing_is_kept_nothing_happens(machine):
    machine.offer("1.0")
    assert machine.given() == []


def test_kept_lists_are_given_to_apt_but_for_one_that_its_release_does_not_know(machine):
    lists = machine.kept / "lists"
    lists.mkdir(parents=True)
    (machine.kept / "archives").mkdir()
    (lists / "a_Packages").write_text("Package: a\n")
    (lists / "b_Packages").write_text("Package: b\n")
    (lists / "a_InRelease").write_text(f"SHA256:\n {hashlib.sha256(b'Package: a' + bytes([10])).hexdigest()} 11 x\n")
    machine.run(lists_command(str(machine.folder / "data"), str(machine.lists)))
    assert sorted(file.name for file in machine.lists.iterdir() if file.is_file()) == ["a_InRelease", "a_Packages"]


def test_kept_is_what_is_installed_with_the_lists_it_came_from_and_nothing_that_was_replaced(tmp_path):
    archives, lists, place = tmp_path / "archives", tmp_path / "lists", tmp_path / "data/packages/x"
    archives.mkdir()
    lists.mkdir()
    name, version, arch = sorted(installed())[0]
    mine = f"{name}_{version.replace(':', '%3a')}_{arch}.deb"
    for file in (archives / mine, archives / "gone_1_all.deb", lists / "y_InRelease", lists / "y_Translation-en"):
        file.write_text("x" * 10)
    assert keep(place, archives, lists, installed()) == {"packages": 1, "bytes": 10}
    (place / "archives/old_1_all.deb").touch()
    (lists / "y_Packages").touch()
    assert keep(place, archives, lists, installed())["packages"] == 1
    there = sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())
    assert there == [f"archives/{mine}", "lists/y_InRelease", "lists/y_Packages"]
    assert is_of(Path("git_1%3a2.0-1_amd64.deb"), {("git", "1:2.0-1", "amd64")})
