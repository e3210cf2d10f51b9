"""The supervisor with real ranks on this machine: DeepSpeed's launcher, our rank start, small programs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import with_checkpoint
from tests.support.forks.sitecustomize import FORK_SERVER
from tests.support.supervised import on_two_nodes, pid_of_rank, status_of, supervisors, wait_for_output
from tests.support.waiting import as_soon_as, until
from training.node.diagnosis.stacks import process_state
from training.node.diagnosis.xid import parse_xid
from training.node.supervision import generation, launcher, run_status, supervise
from training.node.supervision.end_processes import processes_of
from training.node.supervision.launcher_output import LINE_BYTES, QUEUED
from training.node.supervision.nodes import NodeError, collect, link_results, master_port, ssh, write_reports
from training.node.supervision.supervise import Supervisor
from training.run.causes import Cause
from training.run.events import EVENTS, Ended, Failed, OffPlan, Started, line_of, parse_rows
from training.run.folder import LAUNCH_MARK
from training.run.history import read_starts
from training.run.launch import MASTER_PORTS, Host, Launch, launch_text, parse_launch
from training.run.notices import release_text
from training.text.problems import PEER_LOST

RUN = "tiny-20260101-000000"

pytestmark = pytest.mark.torch
pytest.importorskip("deepspeed", reason="needs the [train] extra: DeepSpeed's launcher starts the ranks")


@pytest.fixture
def start(tmp_path):
    """Start a supervisor of two ranks that run one of PROGRAMS."""
    with supervisors(tmp_path) as started:
        yield started


def test_ranks_that_all_end_well_make_a_finished_run(start):
    run_dir, supervisor = start("finishes")
    assert supervisor.wait(120) == 0
    assert status_of(run_dir).state == "finished"
    assert "done 1" in (run_dir / "logs" / "rank-1.log").read_text()
    assert "[0] done 0" in (run_dir / "logs" / "launcher.log").read_text()
    (only,) = read_starts(run_dir)
    assert (only.at, only.ended) == (status_of(run_dir).started, status_of(run_dir).ended)


def test_a_killed_rank_is_named_within_seconds_and_nothing_is_left(start):
    run_dir, supervisor = start("waits", forked=False)
    wait_for_output(run_dir, 1, "waiting 1")
    wait_for_output(run_dir, 0, "waiting 0")
    os.kill(pid_of_rank(run_dir, 1), signal.SIGKILL)
    assert supervisor.wait(120) == 1
    status = status_of(run_dir)
    assert (status.state, status.failed_rank, status.failed_node) == ("failed", 1, "localhost")
    assert status.reason == "rank 1 on localhost was killed by signal 9 (SIGKILL)"
    assert status.cause == Cause("killed", signal=9)
    assert status.last_lines[-1] == "waiting 1 of 2"
    assert processes_of(str(run_dir)) == []


def test_a_stop_lets_the_ranks_save_and_leave_at_their_own_pace(start):
    run_dir, supervisor = start("waits")
    wait_for_output(run_dir, 1, "waiting 1")
    supervisor.terminate()
    assert supervisor.wait(120) == 0
    assert status_of(run_dir).state == "stopped"
    assert "after saving" in status_of(run_dir).reason
    assert (run_dir / "saved-0").exists() and (run_dir / "saved-1").exists()


def test_a_run_far_from_its_plan_says_so_in_its_status_while_it_goes(start):
    run_dir, supervisor = start("is_slower_than_planned")
    wait_for_output(run_dir, 0, "slow 0")
    until(lambda: (run_dir / "status.json").exists() and status_of(run_dir).state == "running", "both ranks run")
    until(lambda: status_of(run_dir).planned_step_s)
    status = status_of(run_dir)
    assert (status.state, status.planned_step_s, status.measured_step_s) == ("running", 10.0, 14.5)
    assert [t.event for t in parse_rows((run_dir / EVENTS).read_text()) if isinstance(t.event, OffPlan)]
    supervisor.terminate()
    assert supervisor.wait(120) == 0


def test_a_stop_waits_as_long_as_the_steps_so_far_ask_for_whatever_was_planned(start):
    run_dir, supervisor = start("steps_slowly", stop_grace_s=1)
    wait_for_output(run_dir, 0, "slow 0")
    before = status_of(run_dir).updated
    until(lambda: status_of(run_dir).updated != before, "the supervisor's next look")
    supervisor.terminate()
    assert supervisor.wait(120) == 0
    assert "after saving" in status_of(run_dir).reason
    assert (run_dir / "saved-0").exists() and (run_dir / "saved-1").exists()


def test_ranks_that_ignore_a_stop_are_ended_after_the_grace(start):
    run_dir, supervisor = start("is_deaf", stop_grace_s=4, forked=False)
    wait_for_output(run_dir, 1, "deaf")
    supervisor.terminate()
    until(lambda: status_of(run_dir).reason == "stopping: saving a checkpoint")
    assert status_of(run_dir).cause == Cause("asked")
    assert supervisor.wait(120) == 0
    assert status_of(run_dir).state == "stopped"
    assert "did not save in time" in status_of(run_dir).reason
    assert processes_of(str(run_dir)) == []


def test_a_failing_rank_speaks_for_itself(start):
    run_dir, supervisor = start("raises")
    assert supervisor.wait(120) == 1
    status = status_of(run_dir)
    assert status.reason == "rank 1 on localhost ended with code 1: ValueError: the seventh sample is odd"
    assert any("Traceback" in line for line in status.last_lines)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("fills_the_disk", "the disk is full"), ("loses_a_peer", "rank 1 on localhost was killed by signal 9")],
)
def test_the_cause_is_named_and_not_its_consequence(start, program, reason):
    run_dir, supervisor = start(program)
    assert supervisor.wait(120) == 1
    assert reason in status_of(run_dir).reason
    assert status_of(run_dir).failed_rank == 1


def test_what_cannot_be_used_is_the_users_mistake_and_a_broken_rank_is_not(start):
    run_dir, supervisor = start("cannot_be_used")
    assert supervisor.wait(120) == 1
    status = status_of(run_dir)
    assert status.reason == "rank 0 on localhost could not go on: recipe x: steps: no such key"
    assert status.mistake and status.cause == Cause("unusable")


def test_a_rank_that_says_what_it_was_is_believed_and_its_output_is_no_event(start):
    run_dir, supervisor = start("diverges")
    assert supervisor.wait(120) == 1
    status = status_of(run_dir)
    assert (status.cause, status.failed_rank) == (Cause("diverged", code=1), 1)
    assert status.reason == "rank 1 on localhost ended with code 1: the loss is nan"
    assert status.last_lines == ('@{"event": "ended", "code": 0}',)
    told = [(each.rank, type(each.event)) for each in parse_rows((run_dir / EVENTS).read_text())]
    assert sorted(told, key=lambda each: (each[0], each[1].__name__))[:1] == [(0, Started)]
    assert [kind for rank, kind in told if rank == 1] == [Started, Failed, Ended]


def test_the_ranks_meet_at_the_first_free_pair_of_the_documented_ports():
    with socket.socket() as taken:
        taken.bind(("", 0))
        pair = MASTER_PORTS[0], MASTER_PORTS[1]
        first = master_port("te1")
        assert first in MASTER_PORTS and (first - pair[0]) % 2 == 0
        with socket.socket() as second:
            second.bind(("", first + 1))
            assert first < master_port("te1") < MASTER_PORTS[-1]
    ephemeral = [int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()]
    assert MASTER_PORTS[-1] < ephemeral[0]


def test_no_free_pair_of_ports_is_said_with_the_range(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("training.node.supervision.nodes.MASTER_PORTS", range(port, port + 2))
        with pytest.raises(NodeError, match=f"free from {port} to {port + 1}"):
            master_port("te1")


def test_children_of_a_rank_do_not_outlive_the_run(start):
    run_dir, supervisor = start("leaves_children")
    assert supervisor.wait(120) == 1
    assert "rank 1 on localhost ended with code 11" in status_of(run_dir).reason
    assert processes_of(str(run_dir)) == []


EACH = pytest.mark.parametrize("launcher", ["spotune", "deepspeed", "torchrun"])


@pytest.fixture
def start_on_nodes(start, tmp_path, monkeypatch):
    return on_two_nodes(start, tmp_path, monkeypatch)


@EACH
def test_ranks_on_nodes_get_the_environment_and_a_run_finishes(start_on_nodes, launcher):
    run_dir, supervisor = start_on_nodes("shows_its_environment", launcher=launcher)
    assert supervisor.wait(120) == 0
    assert status_of(run_dir).state == "finished"
    for rank in (0, 1):
        assert f"omp 1 run {run_dir}" in (run_dir / "logs" / f"rank-{rank}.log").read_text()
    assert "te2: [1] omp 1" in (run_dir / "logs" / "launcher.log").read_text()


def fork_servers(run_dir: Path) -> list[int]:
    """Pids of those that wait for their port."""
    waiting = []
    for pid in processes_of(str(run_dir)):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            waiting += [pid] if words[0] == sys.executable and FORK_SERVER in words else []
    return waiting


@pytest.fixture
def lock_of_starts(tmp_path: Path) -> Iterator[int]:
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield lock
    os.close(lock)


def test_a_run_that_was_started_early_begins_when_it_is_told_by_the_processes_that_wait(start_on_nodes, lock_of_starts):
    run_dir, supervisor = start_on_nodes("shows_its_environment", early=True)
    until(lambda: len(fork_servers(run_dir)) == 2, "fork servers on both nodes")
    waiting = fork_servers(run_dir)
    assert not (run_dir / "status.json").exists()
    (run_dir / "go").touch()
    assert supervisor.wait(120) == 0
    assert status_of(run_dir).state == "finished" and not (run_dir / "go").exists()
    log = (run_dir / "logs" / "launcher.log").read_text()
    assert log.count(LAUNCH_MARK) == 1 and {f"parent {pid}" for pid in waiting} == set(re.findall("parent .*", log))


def test_ranks_import_their_program_anew_where_the_plan_changed_what_they_are(start_on_nodes, lock_of_starts):
    run_dir, supervisor = start_on_nodes("shows_its_environment", early=True)
    until(lambda: len(fork_servers(run_dir)) == 2, "fork servers on both nodes")
    launch = parse_launch((run_dir / "launch.json").read_text())
    changed = replace(launch, env={**launch.env, "OMP_NUM_THREADS": "2"}, hosts=launch.hosts[::-1])
    (run_dir / "launch.json").write_text(launch_text(changed))
    (run_dir / "go").touch()
    assert supervisor.wait(120) == 0
    assert "te2: [0] omp 2" in (run_dir / "logs" / "launcher.log").read_text()


@pytest.mark.parametrize("gone", ["the laptop", "the folder", "the unit"])
def test_of_a_run_that_never_begins_nothing_is_left(start_on_nodes, lock_of_starts, gone):
    run_dir, supervisor = start_on_nodes("waits", early=True, before=lambda run_dir: (run_dir / "preparing").touch())
    until(lambda: len(fork_servers(run_dir)) == 2, "fork servers on both nodes")
    if gone == "the laptop":
        fcntl.flock(lock_of_starts, fcntl.LOCK_UN)
    elif gone == "the unit":
        supervisor.terminate()
    else:
        shutil.rmtree(run_dir)
    assert supervisor.wait(60) == 0
    until(lambda: not processes_of(str(run_dir)), "no process of the run")
    assert not run_dir.exists()


def test_a_node_without_its_data_disk_gets_nothing_and_is_named(start_on_nodes, tmp_path: Path):
    disk = tmp_path / "not a mount point"
    disk.mkdir()
    deploy = "pyinfra -y inventory/static.py deploy/base.py"
    run_dir, supervisor = start_on_nodes("finishes", data_disk=str(disk), deploy=deploy)
    assert supervisor.wait(120) == 1
    status = status_of(run_dir)
    assert status.reason == (
        f"node te1 is not ready: no disk is mounted at {disk}, so nothing is written there; "
        f"on a new machine, as on one that lost it, the base deploy mounts it: {deploy}"
    )
    assert not (run_dir / "logs" / "launcher.log").exists()


def test_a_lost_ping_for_a_broken_ssh_configuration_counts_as_a_miss(tmp_path: Path, monkeypatch):
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("training.node.supervision.generation.PING_EVERY_S", 0.01)
    generation = make_supervisor(tmp_path / "run").generation
    generation._ping(generation.launch.hosts[1])
    assert generation.lost.get(timeout=1) == "te2"


def test_what_a_nodes_shell_prints_by_itself_is_no_part_of_an_answer(tmp_path: Path, monkeypatch):
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift 5; echo Welcome; sh -c "$*"; code=$?; echo Goodbye; exit $code\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert ssh("te2", "echo one; echo two", 5) == "one\ntwo\n"
    with pytest.raises(NodeError, match="ssh ended with code 3"):
        ssh("te2", "exit 3", 5)


def test_every_nodes_logs_come_to_the_head_and_only_those_of_its_own_ranks(tmp_path: Path, monkeypatch):
    run = tmp_path / "run"
    supervisor = make_supervisor(run)
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nhost=$1; shift\nexec sh -c "$(echo "$*" | sed s#{run}#{run}.$host#)"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("of today")
    there = tmp_path / "run.te2" / "logs"
    there.mkdir(parents=True)
    for name in ("rank-0.log", "rank-1.log", "failure-rank-1.txt", "launcher.log"):
        (there / name).write_text("of te2")
    collect(supervisor.launch, supervisor.launch.hosts[1:])
    found = {path.name: path.read_text() for path in (run / "logs").iterdir()}
    assert found == {"rank-0.log": "of today", "rank-1.log": "of te2", "failure-rank-1.txt": "of te2"}


def test_reports_are_made_of_what_there_is_and_their_failure_is_only_said(tmp_path: Path, capfd):
    run = tmp_path / "run"
    launch = make_supervisor(run).launch
    (run / "training" / "node" / "metrics").mkdir(parents=True)
    report = run / "training" / "node" / "metrics" / "report.py"
    report.write_text("import sys\nopen(sys.argv[2] + '/report.html', 'w').close()\nsys.exit(3)\n")
    write_reports(launch)
    assert not (run / "report.html").exists()  # no step was made
    (run / "metrics.jsonl").write_text("{}\n")
    write_reports(launch)
    assert (run / "report.html").exists()
    assert capfd.readouterr().err == "training.node.metrics.report: ended with code 3\n"


def test_what_a_run_of_this_machine_learned_lies_where_it_is_loaded_from_though_nobody_followed_it(start):
    run_dir, supervisor = start("finishes", before=with_checkpoint)
    assert supervisor.wait(120) == 0
    assert (run_dir / "adapter").readlink() == Path("checkpoints/step-2/adapter")
    assert (run_dir / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("here", [True, False])
def test_what_is_damaged_is_not_laid_down_nor_anything_on_a_node(tmp_path: Path, capfd, here: bool):
    run = tmp_path / "run"
    launch = replace(make_supervisor(run).launch, here=here)
    with_checkpoint(run)
    if here:
        (run / "checkpoints" / "step-2" / "optimizer.safetensors").write_bytes(b"other")
    link_results(launch)
    assert not (run / "adapter").is_symlink()
    assert ("no checkpoint is whole" in capfd.readouterr().err) is here


def make_supervisor(run: Path) -> Supervisor:
    """One of two nodes, not started."""
    hosts = (Host("te1", "127.0.0.1", 1), Host("te2", "127.0.0.1", 1))
    launch = Launch(run.name, str(run), hosts, "training.program", (), sys.executable, {})
    run.mkdir()
    (run / "launch.json").write_text(launch_text(launch))
    return Supervisor(run)


@pytest.mark.parametrize("name", ["torchrun", "mpirun"])
def test_ranks_are_started_in_the_order_of_nodes_that_was_planned_meanwhile(tmp_path, monkeypatch, name):
    hosts, asked = (Host("te1", "127.0.0.1", 1), Host("te2", "127.0.0.1", 1), Host("te3", "127.0.0.1", 1)), []
    begun = Launch("x-1", str(tmp_path), hosts, "training.program", (), sys.executable, {}, launcher=name)
    planned = replace(begun, hosts=(hosts[0], hosts[2], hosts[1]))
    monkeypatch.setattr(launcher, "launcher_argv", lambda launch, port: asked.append(launch) or {})
    waiting = launcher.Launcher(begun)
    assert waiting.fits(planned)
    (tmp_path / "logs").mkdir()
    waiting.start_ranks(planned, 29500)
    assert asked == [planned]


@EACH
def test_a_killed_rank_is_named_with_its_node(start_on_nodes, launcher):
    run_dir, supervisor = start_on_nodes("waits", launcher=launcher)
    wait_for_output(run_dir, 0, "waiting 0")
    wait_for_output(run_dir, 1, "waiting 1")
    os.kill(pid_of_rank(run_dir, 1), signal.SIGKILL)
    assert supervisor.wait(120) == 1
    assert status_of(run_dir).reason == "rank 1 on te2 was killed by signal 9 (SIGKILL)"
    assert processes_of(str(run_dir)) == []


@EACH
def test_a_node_whose_connection_ends_is_named(start_on_nodes, launcher):
    run_dir, supervisor = start_on_nodes("waits", launcher=launcher)
    wait_for_output(run_dir, 1, "waiting 1")
    wait_for_output(run_dir, 0, "waiting 0")
    (run_dir.parent / "down" / "te2").touch()
    assert supervisor.wait(120) == 1
    status = status_of(run_dir)
    assert (status.state, status.failed_node) == ("failed", "te2")
    assert "was lost" in status.reason


def test_a_killed_pdsh_is_no_success_although_the_launcher_ends_with_0(start_on_nodes):
    run_dir, supervisor = start_on_nodes("waits", launcher="deepspeed")
    wait_for_output(run_dir, 1, "waiting 1")
    wait_for_output(run_dir, 0, "waiting 0")
    pdsh = next(pid for pid in processes_of(str(run_dir)) if Path(f"/proc/{pid}/comm").read_text().startswith("pdsh"))
    os.kill(pdsh, signal.SIGKILL)
    assert supervisor.wait(120) == 1
    status = status_of(run_dir)
    assert status.state == "failed"
    assert status.exit_code == 0
    assert processes_of(str(run_dir)) == []


def test_a_node_that_does_not_answer_is_named_before_any_rank_starts(start_on_nodes):
    down = Path(os.environ["SPOTUNE_TEST_DOWN"])
    (down / "te2").touch()
    run_dir, supervisor = start_on_nodes("finishes")
    assert supervisor.wait(120) == 1
    status = status_of(run_dir)
    assert status.failed_node == "te2"
    assert "No route to host" in status.reason
    assert not list((run_dir / "logs").glob("rank-*"))


def test_what_the_driver_told_the_kernel_since_the_start_is_asked_of_every_node(tmp_path, monkeypatch):
    """Against a dmesg of our own: no machine of a test has a GPU that falls off the bus."""
    run_dir, tools = tmp_path / "tiny-20260101-000000", tmp_path / "tools"
    for folder in (run_dir, tools):
        folder.mkdir()
    (run_dir / "training").symlink_to(Path(__file__).parents[3] / "training")
    lost = "NVRM: Xid (PCI:0000:00:07): 79, GPU has fallen off the bus."
    (tools / "dmesg").write_text(f"#!/bin/sh\necho '[    1.000000] {lost}'\necho '[999999999.000000] {lost}'\n")
    (tools / "dmesg").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    hosts = (Host("localhost", "127.0.0.1", 1),)
    launch = Launch(run_dir.name, str(run_dir), hosts, "training.node.finetune", (), sys.executable, {}, here=True)
    (run_dir / "launch.json").write_text(launch_text(launch))
    generation = Supervisor(run_dir, tmp_path / "notices").generation
    generation._ask_drivers()
    assert generation.seen.xids == {"localhost": [parse_xid(lost)]}


FLOOD = "yes '[0] some words of a rank that is very verbose about all that it does' & sleep 3; kill $!; sleep 1"


def a_run_here(run: Path, monkeypatch, command: str, ranks: int = 1) -> Supervisor:
    """A supervisor of this machine whose launcher is a shell command."""
    (run / "logs").mkdir(parents=True)
    hosts = (Host("localhost", "127.0.0.1", ranks),)
    launch = Launch(run.name, str(run), hosts, "training.program", (), sys.executable, {}, here=True, hang_s=0)
    (run / "launch.json").write_text(launch_text(launch))
    monkeypatch.setattr(launcher, "launcher_argv", lambda launch, port: {"localhost": ["sh", "-c", command]})
    return Supervisor(run, run.parent / "notices")


def test_a_stop_waits_behind_no_line_and_lines_have_bounds(tmp_path, monkeypatch):
    supervisor = a_run_here(tmp_path / RUN, monkeypatch, f"head -c 3000000 /dev/zero | tr '\\0' x; echo; {FLOOD}")
    asked, taken, made = [], [], []

    def take(line):
        taken.append(len(line))
        if len(taken) == 100:
            supervisor.request_stop()

    monkeypatch.setattr(supervisor.generation.seen, "take", take)
    monkeypatch.setattr(supervisor.generation, "_ask_to_stop", lambda: asked.append(len(taken)))
    new = launcher.Launcher
    monkeypatch.setattr(launcher, "Launcher", lambda launch: made.append(new(launch)) or made[-1])
    assert supervisor.main() == 0
    assert len(asked) == 1 and 100 <= asked[0] < len(taken)
    assert max(taken) == taken[0] == LINE_BYTES and made[0].lines.maxsize == QUEUED
    assert (supervisor.run_dir / "logs" / "launcher.log").read_bytes().count(b"x" * 3_000_000) == 1


def test_a_rank_that_the_others_no_longer_hear_is_asked_what_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "SETTLE_SECONDARY_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as silent:
        silent.send_signal(signal.SIGSTOP)
        until(lambda: process_state(silent.pid) == "T", "the signal")
        left = Failed("peer_lost", "rank 1 has been silent", peer=1)
        told = [(1, Started(silent.pid)), (0, Started(1)), (0, left), (0, Ended(PEER_LOST))]
        words = "\\n".join(f"[{rank}] {line_of(event)}" for rank, event in told)
        command = f"printf '%b\\n' {shlex.quote(words)}; exec sleep 60"
        supervisor = a_run_here(tmp_path / RUN, monkeypatch, command, ranks=2)
        (supervisor.run_dir / "training").symlink_to(Path(supervise.__file__).parents[2])
        assert supervisor.main() == 1
        silent.kill()
    assert (supervisor.status.value.cause, supervisor.status.value.failed_rank) == (Cause("peer_lost", peer=1), 1)
    (stack,) = (supervisor.run_dir / "hang").rglob("rank-*.txt")
    assert stack.read_text().startswith("rank 1 on localhost: process state T")
    assert str(stack.parent.relative_to(supervisor.run_dir)) in supervisor.status.value.reason


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of a few files, which a test may fill or make read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=40,size=2m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs root: it mounts a file system")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill_inodes(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        for n in range(100):
            (disk / f"file-{n}").touch()


def test_without_an_inode_the_ranks_are_asked_to_stop_and_the_last_status_is_written(small_disk, monkeypatch):
    supervisor = a_run_here(small_disk / RUN, monkeypatch, f"until [ -e {small_disk / RUN}/stop ]; do sleep 0.1; done")
    launched = supervisor.run_dir / "logs" / "launcher.log"
    as_soon_as(launched.exists, lambda: fill_inodes(small_disk) or supervisor.request_stop())
    assert supervisor.main() == 0
    assert (status_of(supervisor.run_dir).state, status_of(supervisor.run_dir).cause.kind) == ("stopped", "asked")


def test_a_supervisor_outlives_a_disk_that_becomes_read_only_and_names_it(small_disk, monkeypatch, capfd):
    failed = "echo \"[0] OSError: [Errno 30] Read-only file system: 'x'\"; echo '[0] "
    supervisor = a_run_here(small_disk / RUN, monkeypatch, f"{failed}{line_of(Ended(1))}'")
    argv = launcher.launcher_argv(supervisor.launch, 0)

    def becomes_read_only(launch: Launch, port: int) -> dict[str, list[str]]:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        return argv

    monkeypatch.setattr(launcher, "launcher_argv", becomes_read_only)
    assert supervisor.main() == 1
    assert supervisor.status.value.cause == Cause("disk_read_only", code=1) and supervisor.status.value.ended
    assert "its disk is read-only" in capfd.readouterr().err


def test_a_start_on_a_full_disk_is_a_run_that_failed_for_it(small_disk, monkeypatch):
    supervisor = a_run_here(small_disk / RUN, monkeypatch, "true")
    (small_disk / "large").write_bytes(b"x" * 1_900_000)
    assert supervisor.main() == 1
    assert status_of(supervisor.run_dir).cause == Cause("disk_full")
    assert status_of(supervisor.run_dir).reason.endswith("; free space, then fab train --resume")


def test_a_node_with_a_full_disk_is_named_before_anything_is_sent_there(small_disk, tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    supervisor = make_supervisor(small_disk / RUN)
    assert supervisor.main() == 1
    status = status_of(supervisor.run_dir)
    assert re.fullmatch(
        r"node te1 is not ready: .*No space left on device; free space, then fab train --resume", status.reason
    )
    assert status.cause == Cause("disk_full") and not list((supervisor.run_dir / "logs").iterdir())


@pytest.mark.parametrize("jump_s", [-3600, 7200])
def test_a_clock_that_is_set_neither_freezes_the_status_nor_ends_the_run(tmp_path, monkeypatch, jump_s):
    enough = tmp_path / "enough"
    supervisor = a_run_here(tmp_path / RUN, monkeypatch, f"until [ -e {enough} ]; do sleep 0.1; done")
    monkeypatch.setattr(run_status, "STATUS_EVERY_S", 0.2)
    (tmp_path / "notices").mkdir()
    (tmp_path / "notices" / "release").write_text(release_text(time.time() + 3600))
    real, written, began = time.time, [], time.monotonic()

    def write():
        written.append(supervisor.status.value)
        if len(written) == 5:
            enough.touch()

    monkeypatch.setattr(supervisor.status, "write", write)
    monkeypatch.setattr("time.time", lambda: real() + jump_s)
    assert supervisor.main() == 1
    status = supervisor.status.value
    assert status.cause.kind == "unheard" and len(written) > 4
    assert status.ended - status.started < time.monotonic() - began + 1
