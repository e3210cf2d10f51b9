"""What is missing is named, with the command that supplies it."""

from dataclasses import replace

from inventory.localcloud.prerequisites import PACKAGE_OF_PROGRAM, Machine, missing

FIT = Machine("Linux", True, frozenset(PACKAGE_OF_PROGRAM), True, True, True)


def test_a_fit_machine_misses_nothing():
    assert missing(FIT) == ()


def test_missing_programs_come_with_one_apt_get_line():
    programs = FIT.programs - {"systemd-nspawn", "mmdebstrap"}
    (told,) = missing(replace(FIT, programs=programs))
    assert "systemd-nspawn, mmdebstrap" in told
    assert told.endswith("apt-get install -y mmdebstrap systemd-container")


def test_everything_missing_is_said_at_once():
    told = missing(Machine("Linux", False, FIT.programs, False, False, False))
    assert len(told) == 4
    assert "root" in told[0] and "modprobe overlay" in told[1] and "modprobe loop" in told[2]


def test_another_system_is_told_only_that():
    told = missing(Machine("Darwin", False, frozenset(), False, False, False))
    assert told == ("it runs on Linux only, and this is Darwin",)
