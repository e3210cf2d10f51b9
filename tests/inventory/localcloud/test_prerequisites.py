"""What is missing is named, with the command that supplies it."""

from pathlib import Path

import pytest

from inventory.localcloud import prerequisites
from inventory.localcloud.prerequisites import PACKAGE_OF_PROGRAM, missing_prerequisites


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """One that has all; its programs, to be taken away."""
    programs = set(PACKAGE_OF_PROGRAM)
    (tmp_path / "filesystems").write_text("nodev\toverlay\n")
    monkeypatch.setattr(prerequisites, "FILESYSTEMS", tmp_path / "filesystems")
    monkeypatch.setattr(prerequisites, "LOOP", tmp_path)
    monkeypatch.setattr(prerequisites, "roots", lambda: (tmp_path,))
    monkeypatch.setattr(prerequisites, "_is_there", programs.__contains__)
    monkeypatch.setattr(prerequisites, "attempt", lambda *_: None)
    monkeypatch.setattr(prerequisites.platform, "system", lambda: "Linux")
    monkeypatch.setattr(prerequisites.os, "geteuid", lambda: 0)
    return programs


def test_a_fit_machine_misses_nothing():
    assert missing_prerequisites() == ()


def test_missing_programs_come_with_one_apt_get_line(machine):
    machine -= {"systemd-nspawn", "mmdebstrap"}
    (told,) = missing_prerequisites()
    assert "systemd-nspawn, mmdebstrap" in told
    assert told.endswith("apt-get install -y mmdebstrap systemd-container")


def test_everything_missing_is_said_at_once(tmp_path, monkeypatch):
    (tmp_path / "filesystems").write_text("nodev\ttmpfs\n")
    monkeypatch.setattr(prerequisites, "LOOP", Path("/none"))
    monkeypatch.setattr(prerequisites, "roots", lambda: ())
    monkeypatch.setattr(prerequisites.os, "geteuid", lambda: 1000)
    told = missing_prerequisites()
    assert len(told) == 4
    assert "root" in told[0] and "modprobe overlay" in told[1] and "modprobe loop" in told[2]


def test_another_system_is_told_only_that(monkeypatch):
    monkeypatch.setattr(prerequisites.platform, "system", lambda: "Darwin")
    assert missing_prerequisites() == ("it runs on Linux only, and this is Darwin",)
