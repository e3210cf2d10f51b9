"""SHA256SUMS of a folder, run as nodes run it: the script through `python3 -c`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from deploy import fan_out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "lib/x").mkdir(parents=True)
    (folder / "a file").write_text("a")
    (folder / "lib/x/b").write_bytes(b"b" * 3_000_000)
    (folder / "lib/link").symlink_to("x/b")
    (folder / "lib64").symlink_to("lib")
    return folder


def manifest(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = fan_out.manifest_command(*map(str, arguments))
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)


def test_an_untouched_folder_verifies_and_sha256sum_agrees(folder: Path) -> None:
    assert manifest("write", folder).returncode == 0
    assert manifest("verify", folder).returncode == 0
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_the_manifest_is_sorted_and_the_same_each_time(folder: Path) -> None:
    first = manifest("write", folder).stdout
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    assert [line.partition("  ")[2] for line in lines if not line.startswith("#")] == ["a file", "lib/x/b"]
    assert [line for line in lines if line.startswith("#")] == ["# lib/link -> x/b", "# lib64 -> lib"]
    assert manifest("write", folder).stdout == first


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: (f / "a file").write_text("b"), "a file is not the file it was"),
        (lambda f: (f / "lib/x/b").unlink(), "lib/x/b is missing"),
        (lambda f: ((f / "lib64").unlink(), (f / "lib64").symlink_to("x")), "lib64 does not point to lib"),
        (lambda f: (f / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
    ],
)
def test_each_kind_of_damage_is_named(folder: Path, damage, problem: str) -> None:
    manifest("write", folder)
    damage(folder)
    done = manifest("verify", folder)
    assert done.returncode == 1
    assert problem in done.stderr


def test_excluded_files_and_later_ones_are_no_problem(folder: Path) -> None:
    (folder / "lib/__pycache__").mkdir()
    (folder / "lib/__pycache__/m.pyc").write_text("1")
    manifest("write", folder, "--exclude", "*__pycache__*")
    (folder / "lib/__pycache__/m.pyc").write_text("2")
    (folder / "new").write_text("")
    assert manifest("verify", folder).returncode == 0


def test_a_seal_holds_facts_and_the_manifests_hash(folder: Path) -> None:
    assert manifest("seal", folder, "stamp.json", "repo=a/b", "commit=c=d").returncode == 0
    stamp = json.loads((folder / "stamp.json").read_text())
    digest = subprocess.run(
        ["sha256sum", "SHA256SUMS"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.split()[0]
    assert stamp["repo"] == "a/b"
    assert stamp["commit"] == "c=d"
    assert stamp["hash"] == digest
    assert stamp["sizes"] == {"a file": 1, "lib/x/b": 3_000_000}
    assert manifest("check", folder, "stamp.json").returncode == 0
    manifest("seal", folder, "stamp.json", "repo=a/b")
    assert json.loads((folder / "stamp.json").read_text())["hash"] == digest


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: (f / "lib/x/b").write_bytes(b"b" * 9), "lib/x/b has 9 bytes, not 3000000"),
        (lambda f: (f / "a file").unlink(), "a file is missing"),
        (lambda f: (f / "SHA256SUMS").write_text(""), "SHA256SUMS is not the one the folder was sealed with"),
        (lambda f: (f / "stamp.json").write_text('{"repo"'), "is not a stamp of this folder"),
        (lambda f: (f / "stamp.json").unlink(), "stamp.json is missing"),
    ],
)
def test_the_quick_check_sees_half_files_without_reading_them(folder: Path, damage, problem: str) -> None:
    manifest("seal", folder, "stamp.json")
    damage(folder)
    done = manifest("check", folder, "stamp.json")
    assert done.returncode == 1
    assert problem in done.stderr
