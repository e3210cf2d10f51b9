"""Password logins off: the deploy's own shell in a temporary folder, with an sshd and a systemctl that act as told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy.refusal import REFUSED
from deploy.trust_files import SSHD_CONFIG, apply_sshd, look_at_sshd

OLD = "PasswordAuthentication yes\n"


class Sshd:
    """A drop-in's folder, and what sshd and systemctl answer."""

    def __init__(self, root: Path) -> None:
        self.drop_in = root / "sshd_config.d/10-spotune.conf"
        self.new = Path(f"{self.drop_in}.new")
        self.drop_in.parent.mkdir()
        self.programs = root / "bin"
        self.programs.mkdir()
        self.reloaded = root / "reloaded"
        # -T: the first value wins, of this drop-in and then of the distribution's default
        self.answers(
            sshd=f"[ $1 = -t ] || {{ cat {self.drop_in} 2>/dev/null; echo passwordauthentication yes; }} | "
            "tr A-Z a-z | awk '!seen[$1]++'"
        )
        self.answers(systemctl=f"touch {self.reloaded}")
        self.drop_in.write_text(OLD)

    def answers(self, **programs: str) -> None:
        for name, script in programs.items():
            (self.programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.programs / name).chmod(0o755)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{self.programs}:{os.environ['PATH']}"}
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=environment)

    def apply(self) -> subprocess.CompletedProcess[str]:
        self.new.write_text(SSHD_CONFIG)
        return self.run(apply_sshd(str(self.drop_in)))

    def reasons(self) -> list[str]:
        return self.run(look_at_sshd(str(self.drop_in))).stdout.splitlines()


@pytest.fixture
def sshd(tmp_path: Path) -> Sshd:
    return Sshd(tmp_path)


def test_the_new_settings_are_taken_up_and_nothing_is_left_over(sshd: Sshd) -> None:
    assert sshd.reasons() == ["passwordauthentication yes"]
    done = sshd.apply()
    assert (done.returncode, done.stderr) == (0, "")
    assert sshd.drop_in.read_text() == SSHD_CONFIG
    assert sshd.reloaded.exists()
    assert list(sshd.drop_in.parent.iterdir()) == [sshd.drop_in]
    assert sshd.reasons() == ["shut"]


def test_an_sshd_that_refuses_keeps_the_old_file_and_is_not_reloaded(sshd: Sshd) -> None:
    sshd.answers(sshd="exit 255")
    done = sshd.apply()
    assert done.returncode == REFUSED
    assert done.stderr == "sshd refuses the new settings; the old settings are back\n"
    assert sshd.drop_in.read_text() == OLD
    assert not sshd.reloaded.exists()


def test_where_there_was_no_file_a_refusal_leaves_none(sshd: Sshd) -> None:
    sshd.drop_in.unlink()
    sshd.answers(sshd="exit 255")
    assert sshd.apply().returncode == REFUSED
    assert not sshd.drop_in.exists()


def test_an_sshd_config_without_the_include_is_named(sshd: Sshd) -> None:
    sshd.answers(sshd="[ $1 = -t ] || { echo port 22; echo passwordauthentication yes; echo permitrootlogin yes; }")
    done = sshd.apply()
    assert done.returncode == REFUSED
    assert "passwordauthentication yes permitrootlogin yes" in done.stderr
    assert "must be: Include /etc/ssh/sshd_config.d/*.conf" in done.stderr
    assert sshd.drop_in.read_text() == OLD
    assert not sshd.reloaded.exists()


def test_a_reload_that_fails_is_said_and_the_next_run_tries_again(sshd: Sshd) -> None:
    sshd.answers(systemctl="exit 1")
    done = sshd.apply()
    assert done.returncode == REFUSED
    assert done.stderr == "sshd could not be reloaded; the old settings are back\n"
    assert sshd.drop_in.read_text() == OLD


def test_a_deploy_cut_off_before_the_reload_is_not_taken_for_done(sshd: Sshd) -> None:
    sshd.drop_in.write_text(SSHD_CONFIG)
    sshd.new.write_text(SSHD_CONFIG)
    assert sshd.reasons() == ["new settings that sshd has not taken up"]


def test_an_sshd_that_does_not_answer_is_not_taken_for_shut(sshd: Sshd) -> None:
    sshd.answers(sshd="echo broken >&2; exit 255")
    assert sshd.reasons() == ["sshd -T fails"]
