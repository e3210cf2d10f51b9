"""`hours_idle`: machines that nothing uses go sooner, and as planned once something does again. And what is said where
a run goes on that nobody follows."""

import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from inventory import node_program
from inventory.cloud.errors import CloudError, Kind
from inventory.renting import lease, tags
from inventory.settings import Settings
from inventory.shown import clock
from tests.support.memory_cloud import MemoryCloud
from tests.support.rented_in_memory import Rented
from tests.support.run_folders import make_run
from training.laptop import head_node, rental, start_lock
from training.laptop.head_node import HereHead
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session

HOUR = timedelta(hours=1)
NEW = "tiny-20260131-154500"


@pytest.fixture
def rented(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("inventory.renting.machines.reached", lambda *_: None)
    cloud = MemoryCloud()
    for module in (rental, lease):
        monkeypatch.setattr(module, "open_cloud", lambda settings: cloud)
    return lambda **table: Rented(tmp_path, cloud, **table)


def release(cluster):
    return min(each.release_at for each in cluster.cloud.instances())


def ahead(cluster):
    return release(cluster) - datetime.now(UTC)


def test_idle_machines_go_sooner_and_as_planned_once_they_are_used_again(rented):
    cluster = rented(hours_idle=1)
    cluster.up(2, hours=4)
    planned = release(cluster)
    assert lease.bring_forward(cluster.cloud, cluster.settings) == (planned, release(cluster))
    assert HOUR - timedelta(minutes=1) < ahead(cluster) <= HOUR
    assert abs(lease.move_back(cluster.cloud, cluster.settings) - planned) < lease.SAME
    assert abs(release(cluster) - planned) < lease.SAME
    assert lease.move_back(cluster.cloud, cluster.settings) is None


def test_the_first_planned_time_counts_though_machines_idled_twice(rented):
    cluster = rented(hours_idle=2)
    cluster.up(1, hours=4)
    planned = release(cluster)
    lease.bring_forward(cluster.cloud, cluster.settings)
    lease.bring_forward(cluster.cloud, cluster.settings)
    lease.move_back(cluster.cloud, cluster.settings)
    assert abs(release(cluster) - planned) < lease.SAME


def test_idling_never_lets_machines_stay_longer_nor_go_sooner_than_the_cloud_can(rented):
    cluster = rented(hours_idle=3)
    cluster.up(1, hours=1)
    before = release(cluster)
    lease.bring_forward(cluster.cloud, cluster.settings)
    assert release(cluster) == before
    short = rented(hours_idle=0.1)
    lease.bring_forward(short.cloud, short.settings)
    assert lease.EARLIEST - timedelta(minutes=1) < ahead(short) <= lease.EARLIEST


def test_moving_back_does_not_go_beyond_the_budget(rented):
    cluster = rented(hours_idle=1, spot="off")
    cluster.up(1, hours=10)
    lease.bring_forward(cluster.cloud, cluster.settings)
    poor = rented(hours_idle=1, spot="off", budget=4)
    lease.move_back(poor.cloud, poor.settings)
    assert HOUR < ahead(poor) < 5 * HOUR


def test_a_tag_of_planned_time_buys_no_more_than_the_hours_of_an_order(rented):
    cluster = rented(hours_idle=1)
    cluster.up(1, hours=2)
    (machine,) = cluster.cloud.instances()
    cluster.cloud.tag("instance", [machine.instance_id], {tags.PLANNED_TAG: "2099-01-01T00:00:00Z"})
    lease.move_back(cluster.cloud, cluster.settings)
    assert 2 * HOUR < ahead(cluster) <= 4 * HOUR


def test_a_time_that_a_run_extended_meanwhile_is_not_shortened_by_the_old_plan(rented):
    cluster = rented(hours_idle=1)
    cluster.up(1, hours=2)
    lease.bring_forward(cluster.cloud, cluster.settings)
    lease.extend(cluster.cloud, cluster.settings, 5 * HOUR, print)
    assert lease.move_back(cluster.cloud, cluster.settings) is None and ahead(cluster) > 4 * HOUR


def test_a_plan_that_the_budget_cuts_is_cut_in_the_tags_too(rented):
    cluster = rented(hours_idle=1)
    cluster.up(1, hours=10)
    lease.bring_forward(cluster.cloud, cluster.settings)
    (machine,) = cluster.cloud.instances()
    lease.note_plan(cluster.cloud, machine, cut := machine.release_at - 0.4 * HOUR)
    (machine,) = cluster.cloud.instances()
    assert abs(tags.moment_of(machine.tags, tags.PLANNED_TAG) - cut) < timedelta(seconds=2)


class Cluster(Session):
    """One whose nodes say what they are told to."""

    te2 = ""

    def ask_all(self, command):
        return {"te1": "", "te2": self.te2}


@pytest.fixture
def opened(rented, tmp_path):
    """A cluster for which `hours_idle` is set, and one without."""

    def opened(**table):
        cluster = rented(**table)
        cluster.up(2, hours=4)
        return cluster, Cluster(HereHead(tmp_path / "runs"), settings=cluster.settings)

    return opened


def test_after_a_command_the_machines_idle_and_the_next_one_moves_that_back(opened, capsys):
    cluster, at_hand = opened(hours_idle=1)
    planned = release(cluster)
    with rental.in_use(at_hand):
        assert release(cluster) == planned
    said = capsys.readouterr().out
    assert said.startswith(
        f"nothing uses the machines: the cloud releases them at {clock(release(cluster))} instead of "
    )
    assert ahead(cluster) <= HOUR
    with rental.in_use(at_hand):
        assert abs(release(cluster) - planned) < lease.SAME
        assert capsys.readouterr().out == f"the machines stay until {clock(release(cluster))} again\n"


def test_without_hours_idle_nothing_moves_and_nothing_is_said(opened, capsys):
    cluster, at_hand = opened()
    planned = release(cluster)
    with rental.in_use(at_hand):
        pass
    lease.restore(Settings(provider="static"))
    assert release(cluster) == planned and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("vim (7) was started over ssh\n", "te2: vim (7) was started over ssh"),
        ("4711 python -m serve --model /data/models/tiny\n", "te2: 4711 python -m serve --model /data/models/tiny"),
        (OSError("timed out"), "te2: is not known (timed out)"),
    ],
)
def test_machines_that_somebody_may_use_stay_as_planned(opened, capsys, monkeypatch, answer, said):
    cluster, at_hand = opened(hours_idle=1)
    planned = release(cluster)
    monkeypatch.setattr(Cluster, "te2", answer)
    rental.shorten_idle_lease(at_hand)
    assert release(cluster) == planned
    assert capsys.readouterr().out == f"the machines stay as planned: {said}\n"


def test_a_program_with_a_model_is_found_on_a_node_and_the_question_itself_is_not(tmp_path):
    head = HereHead(tmp_path)
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()", "/data/models/of-this-test"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as program:
        found = head.shell(rental.USERS)
        program.stdin.close()
    assert f"{program.pid} {' '.join(argv)}" in found and "pgrep" not in found
    assert "of-this-test" not in head.shell(rental.USERS)


SESSION = "0::/user.slice/user-0.slice/session-{}.scope"
IDLE = [
    (1, 0, "0::/init.scope", "systemd"),
    (500, 1, "0::/system.slice/ssh.service", "sshd"),
    (600, 1, "0::/system.slice/spotune-spot-watch.service", "python3"),
    (700, 500, SESSION.format(1), "sshd-session"),  # a connection on which nothing runs
    (701, 1, "0::/user.slice/user-0.slice/user@0.service/init.scope", "(sd-pam)"),
    (800, 500, SESSION.format(2), "sshd"),
    (801, 800, SESSION.format(2), "sudo"),
]
"""Of a node on which only the question itself runs, behind the last of them: pid, parent, cgroup, name."""


def test_what_answers_questions_about_runs_uses_no_machine(tmp_path, monkeypatch):
    with node_program.start_here(shlex.join(head_node.ARGV)) as program:
        assert head_node.Questions(program).ask(fs.exists, tmp_path)
        found = HereHead(tmp_path).shell(f"pgrep -f {rental._QUESTIONS}").split()
        assert found and str(os.getpid()) not in found
    (tmp_path / "ps").write_text(f"#!/bin/sh\necho '900 700 {SESSION.format(1)} python3'\necho '700 1 0:: sshd'\n")
    (tmp_path / "pgrep").write_text('#!/bin/sh\ncase "$*" in *on_head*) echo 899; echo 900 ;; esac\n')
    for name in ("ps", "pgrep"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert HereHead(tmp_path).shell(rental.USERS) == ""
    (tmp_path / "pgrep").unlink()
    assert "python3 (900)" in HereHead(tmp_path).shell(rental.USERS)


@pytest.mark.parametrize(
    ("process", "found"),
    [
        (None, False),
        ((900, 700, SESSION.format(1), "code-server"), True),
        ((900, 700, SESSION.format(1), "sftp-server"), True),
        ((900, 1, SESSION.format(3), "tmux: server"), True),
        ((900, 600, "0::/system.slice/spotune-spot-watch.service", "curl"), False),
    ],
)
def test_who_came_by_ssh_is_found_by_its_processes(tmp_path, monkeypatch, process, found):
    ps = tmp_path / "ps"
    rows = [*IDLE, *([process] if process else [])]
    table = "".join(f"{pid:7} {parent:7} {group:60} {name}\n" for pid, parent, group, name in rows)
    ps.write_text(f"#!/bin/sh\necho \"$PPID 801 {SESSION.format(2)} sh\"\ncat <<'EOF'\n{table}EOF\n")
    ps.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answer = HereHead(tmp_path).shell(rental.USERS)
    assert answer.count("over ssh") == found and (not found or "900" in answer)


def test_a_run_that_goes_on_or_is_being_started_keeps_the_machines(opened, capsys, monkeypatch):
    cluster, at_hand = opened(hours_idle=1)
    planned = release(cluster)
    with start_lock.hold_start_lock(at_hand.head):
        rental.shorten_idle_lease(at_hand)
    assert release(cluster) == planned and capsys.readouterr().out == ""
    make_run(at_hand.head.runs, NEW)  # which is over
    rental.shorten_idle_lease(at_hand)
    assert release(cluster) < planned


def test_a_cloud_that_does_not_answer_is_a_line_and_ends_no_command(opened, capsys, monkeypatch):
    _, at_hand = opened(hours_idle=1)

    def silent(settings):
        raise CloudError("no answer", Kind.PASSING)

    for module in (rental, lease):
        monkeypatch.setattr(module, "open_cloud", silent)
    with rental.in_use(at_hand):
        rental.print_release_time(at_hand)
    said = capsys.readouterr().out.splitlines()
    assert [line.endswith("no answer") or "(no answer)" in line for line in said] == [True] * 3


def test_who_follows_a_run_is_told_beforehand_what_comes_after_it(opened, capsys, monkeypatch):
    cluster, at_hand = opened(hours_idle=1.5)
    monkeypatch.setattr(lease, "keep_machines", lambda *_: nullcontext())
    monkeypatch.setattr(rental, "RemoteHead", lambda node: HereHead(Path()))
    with rental.lease_extended(Cluster(at_hand.head, (None,), cluster.settings)):
        assert "they are released 1.5 h later (hours_idle)" in capsys.readouterr().out
        assert ahead(cluster) > 3 * HOUR
    assert ahead(cluster) <= 1.5 * HOUR


def test_a_run_that_nobody_follows_says_until_when_its_machines_are_there(opened, capsys):
    cluster, at_hand = opened()
    rental.print_release_time(at_hand)
    said = capsys.readouterr().out
    assert said.startswith(
        f"The cloud releases the machines at {clock(release(cluster))}; while no one follows the run, nothing"
    )
    assert said.count("\n") == 1
    rental.print_release_time(Session(at_hand.head, settings=Settings(provider="static")))
    assert capsys.readouterr().out == ""
    rental.print_release_time(opened(hours_idle=1)[1])
    assert capsys.readouterr().out.endswith("\nhours_idle waits for the next command of this laptop\n")


def test_machines_that_a_cloud_never_releases_cost_until_fab_down(opened, capsys):
    cluster, at_hand = opened(hours_idle=1)
    cluster.cloud.abilities = frozenset()
    rental.print_release_time(at_hand)
    assert capsys.readouterr().out == "The machines cost until fab down\n"
    assert lease.bring_forward(cluster.cloud, cluster.settings)[0] is None


def test_a_tag_that_is_no_time_is_none():
    now = datetime(2026, 11, 23, 8, 30, tzinfo=UTC)
    assert tags.moment_of({"k": tags.moment(now)}, "k") == now
    assert tags.moment_of({"k": "soon"}, "k") is tags.moment_of({}, "k") is None
