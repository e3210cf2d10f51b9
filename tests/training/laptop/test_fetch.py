"""Fetching over real sftp on the loopback interface: cut, resumed, damaged; and the faults of adapters."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from paramiko import SFTPClient, SSHException
from paramiko.sftp import CMD_READ

from inventory import ssh
from tests.support.checkpoints import BASE, RANK, adapter_bytes, make_checkpoint
from tests.support.waiting import until
from training.laptop import fetch, runs
from training.laptop.download import Download, _read_ahead
from training.laptop.fetch import FetchInterrupted, fetch_here, fetch_patiently, fetch_remote
from training.laptop.head_node import HereHead, RemoteHead
from training.laptop.runs import read_launch
from training.run.checkpoint_files import FetchError, verify_adapter
from training.run.folder import Status, newest_step, status_text, was_fetched_to, was_made_in, write_atomically
from training.run.launch import Host, Launch, LaunchError, launch_text
from training.text.files import parse_sums, sha256_of, sums_of, sums_text

RUN = "tiny-20260131-154500"


@pytest.fixture
def connect(node) -> Iterator[Callable[[], Callable[[], SFTPClient]]]:
    """Connect to the server; gives the function that opens a channel."""
    with ExitStack() as connections:
        yield lambda: connections.enter_context(ssh.connect(node)).client.open_sftp


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as a head has it."""
    folder = tmp_path / "head" / RUN
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank-0.log").write_text("step 1\n")
    (folder / "plan.json").write_text(json.dumps({"base_model_hash": BASE}))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    make_checkpoint(folder, 2)
    return folder


def test_a_run_comes_home_whole_with_its_newest_checkpoint(connect, run: Path, tmp_path: Path):
    make_checkpoint(run, 10)
    (run / "checkpoints" / ".tmp-step-12").mkdir()
    home = tmp_path / "home"
    fetched = fetch_remote(connect(), str(run), home, full=True)
    assert fetched.step == 10
    there, here = run / "checkpoints" / "step-10", home / "checkpoints" / "step-10"
    for name in parse_sums((there / "SHA256SUMS").read_text()):
        assert (here / name).read_bytes() == (there / name).read_bytes()
    assert (home / "adapter" / "adapter_config.json").exists()
    assert (home / "logs" / "rank-0.log").read_text() == "step 1\n"


def test_what_there_is_to_see_of_a_run_comes_home_too(connect, run: Path, tmp_path: Path):
    wanted = [
        "report-facts.json",
        "data/report.json",
        "tb/events.out.tfevents.1",
        "wandb/offline-run-1/files/config.yaml",
    ]
    wanted += ["evaluation.json", "evaluation-of-0123456789ab.json"]
    foreign = ["data/train.jsonl", "report.html", "wandb/__init__.py", "logs/x.so", ".fetched"]
    for name in [*wanted, *foreign]:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    home = tmp_path / "home"
    fetch_remote(connect(), str(run), home)
    assert [(home / name).read_text() for name in wanted] == wanted
    assert [name for name in foreign if (home / name).exists()] == [".fetched"]
    assert (home / ".fetched").read_text() == f"{run}\n"


def test_a_run_that_was_fetched_was_not_made_here_whatever_its_files_say(connect, run: Path, tmp_path: Path):
    home = tmp_path / "runs" / RUN
    hosts = (Host("localhost", "127.0.0.1", 1),)
    forged = Launch(RUN, str(home), hosts, "training.node.finetune", (), "/bin/sh", {"LD_PRELOAD": "x"}, here=True)
    (run / "launch.json").write_text(launch_text(forged))
    fetch_remote(connect(), str(run), home)
    assert (home / "launch.json").read_text() == launch_text(forged)
    assert (was_made_in(home), was_fetched_to(home)) == (False, True)
    with pytest.raises(LaunchError, match="a run that was fetched is no run of this machine"):
        read_launch(HereHead(home.parent), RUN)


def test_what_was_found_out_comes_home_and_each_ranks_own_profile_does_not(connect, run: Path, tmp_path: Path):
    there = (
        "profile/trace.json.gz",
        "profile/summary.txt",
        "profile/rank-0.json.gz",
        "hang/20260131-155000/rank-1.txt",
    )
    for name in there:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    os.mkfifo(run / "logs" / "nccl-trace-0.pipe")
    home = tmp_path / "home"
    fetch_remote(connect(), str(run), home)
    found = [name for name in there if (home / name).exists() and (home / name).read_text() == name]
    assert found == [there[0], there[1], there[3]]
    assert not (home / "logs" / "nccl-trace-0.pipe").exists()


def test_fetching_again_moves_no_checkpoint_twice(connect, run: Path, tmp_path: Path):
    make_checkpoint(run, 10, big=300_000)
    open_sftp = connect()
    assert fetch_remote(open_sftp, str(run), tmp_path / "home", full=True).bytes_moved > 300_000
    for full in (True, False):
        assert fetch_remote(open_sftp, str(run), tmp_path / "home", full=full).bytes_moved < 1000
    assert (tmp_path / "home" / "checkpoints" / "step-10" / "optimizer.safetensors").exists()


def test_fetching_again_moves_only_what_has_changed_since(connect, run: Path, tmp_path: Path):
    home, logs = tmp_path / "home", run / "logs"
    for name, time_s in (("kept.log", 1e9), ("rewritten.log", 1e9), ("shipped.log", 0)):
        (logs / name).write_text(f"{'a' * 1000} {name}")
        os.utime(logs / name, (time_s, time_s))
    fetch_remote(connect(), str(run), home)
    for name, time_s in (("rewritten.log", 1e9 + 1), ("shipped.log", 0)):  # of the same size
        (logs / name).write_text(f"{'b' * 1000} {name}")
        os.utime(logs / name, (time_s, time_s))
    assert 2000 < fetch_remote(connect(), str(run), home).bytes_moved < 3000
    assert all((home / "logs" / path.name).read_text() == path.read_text() for path in logs.iterdir())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # paramiko's own
def test_a_cut_connection_is_gone_on_with_where_it_broke(connect, server, run: Path, tmp_path: Path):
    size = 24 << 20
    make_checkpoint(run, 10, big=size)
    home = tmp_path / "home"
    server.files.cut_after = 20 << 20
    with pytest.raises((OSError, EOFError, SSHException)):
        fetch_remote(connect(), str(run), home, full=True)
    part = home / "checkpoints" / ".step-10" / "optimizer.safetensors.part"
    kept = part.stat().st_size
    assert kept > 1 << 20
    assert not (home / "checkpoints" / "step-10").exists()
    server.files.cut_after = None
    fetched = fetch_remote(connect(), str(run), home, full=True)
    assert fetched.step == 10
    assert fetched.bytes_moved < size - kept + 10_000


def test_answers_that_overtake_the_requests_cost_one_window_and_not_the_file(
    connect, server, run: Path, tmp_path: Path, monkeypatch
):
    size, requests, send = 24 << 20, [], SFTPClient._async_request

    def starved(self, fileobj, t, *args):
        if t == CMD_READ and args[-1] == 32768 and hasattr(fileobj, "_prefetch_extents"):  # asked ahead
            requests.append(args)
            if len(requests) == 6:
                until(lambda: not fileobj._prefetch_extents, "the answers to all that was asked")
        return send(self, fileobj, t, *args)

    monkeypatch.setattr(SFTPClient, "_async_request", starved)
    make_checkpoint(run, 10, big=size)
    fetched = fetch_remote(connect(), str(run), tmp_path / "home", full=True)
    assert fetched.step == 10 and len(requests) > 700
    assert server.files.served < 1.5 * size


def test_a_broken_connection_is_made_anew_by_itself(connect, run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("training.laptop.fetch.RETRY_AFTER_S", 0)
    broken, whole = connect(), connect()
    broken().get_channel().get_transport().close()
    doors = [broken]

    def open_sftp() -> SFTPClient:
        return doors[-1]()

    fetched = fetch_patiently(open_sftp, lambda: doors.append(whole), str(run), tmp_path / "home")
    assert fetched.step == 2
    assert doors == [broken, whole]


def test_a_part_of_something_else_is_thrown_away(connect, run: Path, tmp_path: Path):
    part = tmp_path / "home" / "checkpoints" / ".step-2" / "optimizer.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"old")
    assert fetch_remote(connect(), str(run), tmp_path / "home", full=True).step == 2


def test_a_flipped_bit_is_found_and_the_checkpoint_gets_no_name(connect, run: Path, tmp_path: Path):
    path = run / "checkpoints" / "step-2" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    with pytest.raises(FetchError, match=r"optimizer\.safetensors is damaged"):
        fetch_remote(connect(), str(run), tmp_path / "home", full=True)
    assert not (tmp_path / "home" / "checkpoints" / "step-2").exists()


def test_damage_at_home_is_found_on_the_next_fetch(connect, run: Path, tmp_path: Path):
    home = tmp_path / "home"
    fetch_remote(connect(), str(run), home)
    (home / "checkpoints" / "step-2" / "adapter" / "adapter_config.json").write_bytes(b"x")
    with pytest.raises(FetchError, match="fetch again"):
        fetch_remote(connect(), str(run), home)


def test_the_optimizer_stays_on_the_head_until_it_is_asked_for(connect, run: Path, tmp_path: Path):
    make_checkpoint(run, 10, big=300_000)
    home, open_sftp = tmp_path / "home", connect()
    assert fetch_remote(open_sftp, str(run), home).bytes_moved < 10_000
    step = home / "checkpoints" / "step-10"
    assert not (step / "optimizer.safetensors").exists()
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=step, check=True)
    assert 300_000 <= fetch_remote(open_sftp, str(run), home, full=True).bytes_moved < 301_000
    there = run / "checkpoints" / "step-10"
    assert (step / "optimizer.safetensors").read_bytes() == (there / "optimizer.safetensors").read_bytes()
    assert (step / "SHA256SUMS").read_bytes() == (there / "SHA256SUMS").read_bytes()


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows(times: str, to: int) -> str:
    return "".join(json.dumps({"step": n, "time": times, "loss": 1.0}) + "\n" for n in range(1, to + 1))


@pytest.mark.parametrize("difference", ["claim", "no claim", "older", "no checkpoint", "went on alone", "another file"])
def test_a_fetch_replaces_nothing_of_another_run_of_the_same_id(connect, run: Path, tmp_path: Path, difference: str):
    """Of another cluster, or of a disk made from an older snapshot of the first one's."""
    home, open_sftp = tmp_path / "home", connect()
    (run / "claim").write_text("one\n")
    (run / "metrics.jsonl").write_text(rows("morning", 6))
    make_checkpoint(run, 4)
    fetch_remote(open_sftp, str(run), home)
    before = everything(home)
    if difference == "claim":
        (run / "claim").write_text("two\n")
    elif difference == "no claim":
        (run / "claim").unlink()
    elif difference in {"older", "no checkpoint"}:
        shutil.rmtree(run / "checkpoints" / "step-4")
        if difference == "no checkpoint":
            shutil.rmtree(run / "checkpoints" / "step-2")
    elif difference == "went on alone":
        (run / "metrics.jsonl").write_text(rows("morning", 2) + rows("evening", 9)[len(rows("evening", 2)) :])
        make_checkpoint(run, 8)
    else:
        shutil.rmtree(run / "checkpoints" / "step-4")
        make_checkpoint(run, 4, adapter=adapter_bytes(b=b"\x02\x3f"))
    with pytest.raises(FetchError, match=rf"to have both: mv {home} {home}\.kept, then fetch again"):
        fetch_patiently(open_sftp, lambda: pytest.fail("nothing broke"), str(run), home)
    after = everything(home)
    assert {name: after[name] for name in before} == before
    home.rename(f"{home}.kept")
    fetch_remote(open_sftp, str(run), home)


def test_a_run_that_was_resumed_from_what_is_at_home_comes_home_as_ever(connect, run: Path, tmp_path: Path):
    home, open_sftp = tmp_path / "home", connect()
    (run / "claim").write_text("one\n")
    (run / "metrics.jsonl").write_text(rows("morning", 6))
    make_checkpoint(run, 4)
    fetch_remote(open_sftp, str(run), home)
    (run / "metrics.jsonl").write_text(rows("morning", 4) + rows("evening", 9)[len(rows("evening", 4)) :])
    make_checkpoint(run, 8)
    assert fetch_remote(open_sftp, str(run), home).step == 8
    assert (home / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_what_was_fetched_carries_its_times(connect, run: Path, tmp_path: Path):
    names = ("plan.json", "logs/rank-0.log", "checkpoints/step-2/adapter/adapter_config.json")
    for name in names:
        os.utime(run / name, (1e9, 1e9))
    open_sftp = connect()
    for full in (False, True):  # the second takes over what the first brought
        fetch_remote(open_sftp, str(run), tmp_path / "home", full)
        assert [(tmp_path / "home" / name).stat().st_mtime for name in names] == [1e9] * 3


def test_a_file_the_login_user_may_not_read_is_named_and_no_broken_connection(connect, run: Path, tmp_path: Path):
    path = run / "checkpoints" / "step-2" / "adapter" / "adapter_model.safetensors"
    path.chmod(0o600)
    with pytest.raises(FetchError, match=rf"{path} may not be read.*chmod -R a\+rX {run}"):
        fetch_patiently(connect(), lambda: pytest.fail("nothing broke"), str(run), tmp_path / "home")


def test_a_file_that_is_gone_for_good_is_named(connect, run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("training.laptop.fetch.RETRY_AFTER_S", 0)
    path = run / "checkpoints" / "step-2" / "adapter" / "adapter_model.safetensors"
    path.unlink()
    with pytest.raises(FetchError, match=r"step-2 is damaged: adapter/adapter_model.safetensors is missing"):
        fetch_patiently(connect(), lambda: pytest.fail("nothing broke"), str(run), tmp_path / "home")


def test_a_folder_at_home_that_cannot_be_made_is_no_broken_connection(connect, run: Path, tmp_path: Path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(FetchError, match=r"home.* on this machine"):
        fetch_patiently(connect(), lambda: pytest.fail("nothing broke"), str(run), tmp_path / "home")


def test_a_head_that_falls_silent_ends_the_fetch_in_words(connect, server, run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("training.laptop.download.SILENCE_S", 0.5)
    monkeypatch.setattr("training.laptop.fetch.TRIES", 1)
    make_checkpoint(run, 10, big=8 << 20)
    server.files.silent_after = 2 << 20
    with pytest.raises(FetchInterrupted, match=r"the head went away .* fetch again to go on"):
        fetch_patiently(connect(), lambda: None, str(run), tmp_path / "home", full=True)


@pytest.mark.parametrize("folder", [RUN, "logs", "checkpoints"])
def test_a_name_that_is_no_files_name_is_refused_and_nothing_is_written(
    connect, server, run: Path, tmp_path: Path, folder: str
):
    (tmp_path / "home" / "logs").mkdir(parents=True)
    (run / "recipe.before-").mkdir()
    (run.parent / "planted").write_text("* * * * * root evil\n")
    (run.parent.parent / "planted").write_text("* * * * * root evil\n")
    before, open_sftp = {path for path in tmp_path.rglob("*") if "home" in path.parts}, connect()
    for name in ("../../planted", "recipe.before-/../../planted", "a/b", "x\x1b[2J", "a\\b"):
        server.files.listed = {folder: name}
        with pytest.raises(FetchError, match="which is no file's name"):
            fetch_remote(open_sftp, str(run), tmp_path / "home")
    written = {path for path in tmp_path.rglob("*") if path.name.startswith("planted")}
    assert written == {run.parent / "planted", run.parent.parent / "planted"}
    if folder != "checkpoints":  # whose names are read after the logs came
        assert {path for path in tmp_path.rglob("*") if "home" in path.parts} == before


def test_sums_with_a_name_that_leads_out_are_damage(connect, run: Path, tmp_path: Path):
    sums = run / "checkpoints" / "step-2" / "SHA256SUMS"
    sums.write_text(sums.read_text() + f"{'0' * 64}  adapter/./../../x\n")
    with pytest.raises(FetchError, match="unreadable line"):
        fetch_remote(connect(), str(run), tmp_path / "home")


def test_a_link_at_home_is_not_written_through(connect, run: Path, tmp_path: Path):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "logs").symlink_to(elsewhere)
    with pytest.raises(FetchError, match="would lie outside"):
        fetch_remote(connect(), str(run), home)
    assert list(elsewhere.iterdir()) == []
    (home / "logs").unlink()
    (home / "logs").mkdir()
    (home / "logs" / "rank-0.log.part").symlink_to(elsewhere / "file")
    with pytest.raises(FetchError, match="on this machine"):
        fetch_patiently(connect(), lambda: pytest.fail("nothing broke"), str(run), home)
    assert list(elsewhere.iterdir()) == []


def test_no_more_comes_than_was_announced(connect, server, run: Path, tmp_path: Path):
    (run / "logs" / "rank-0.log").write_bytes(b"x" * 3_000_000)
    server.files.announced = {"rank-0.log": 70_000}
    fetch_remote(connect(), str(run), tmp_path / "home")
    assert (tmp_path / "home" / "logs" / "rank-0.log").stat().st_size == 70_000


def test_a_file_larger_than_this_machines_disk_is_refused_before_it_comes(connect, server, run: Path, tmp_path: Path):
    server.files.announced = {"rank-0.log": 1 << 60}
    with pytest.raises(FetchError, match=r"rank-0\.log is announced with 1048576\.0 TiB.* left at"):
        fetch_remote(connect(), str(run), tmp_path / "home")
    assert not list(tmp_path.rglob("rank-0.log.part"))


def test_a_reserve_of_this_machines_disk_stays_free_of_all_that_comes_at_once(
    connect, run: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("training.laptop.download.RESERVE_BYTES", 3 << 20)
    usage, home, asked = shutil.disk_usage(tmp_path), tmp_path / "home", itertools.count(1)
    home.mkdir()

    def come() -> int:
        with suppress(FileNotFoundError):  # it has got its name just now
            return sum(path.stat().st_size for path in home.rglob("*.log*"))
        return come()

    def of_ten_mib(folder: Path):
        answer = usage._replace(total=1 << 40, free=(10 << 20) - come())
        if next(asked) == 2:  # the first log comes whole between this answer and what is made of it
            until(lambda: list(home.rglob("rank-?.log")))
        return answer

    monkeypatch.setattr("training.laptop.download.shutil.disk_usage", of_ten_mib)
    for n in range(4):
        (run / "logs" / f"rank-{n}.log").write_bytes(b"x" * (4 << 20))
    logs = [(f"logs/rank-{n}.log", home / f"rank-{n}.log", None) for n in range(4)]
    with pytest.raises(FetchError, match=r"is announced with 4\.0 MiB.*3\.0 MiB stay free"):
        Download(connect(), str(run), home).all(logs)
    assert come() == 4 << 20
    assert not list(home.rglob("*.part"))


@pytest.mark.parametrize(("part_bytes", "owed_then"), [(4000, [1000, 5000]), (6000, [5000])])
def test_a_part_of_something_else_makes_all_of_its_file_owed_again(
    connect, run: Path, tmp_path: Path, monkeypatch, *, part_bytes: int, owed_then: list[int]
):
    file = run / "logs" / "rank-0.log"
    file.write_bytes(b"x" * 5000)
    download, owed = Download(connect(), str(run), tmp_path), []

    def read(*arguments):
        owed.append(sum(download._owed.values()))
        return _read_ahead(*arguments)

    monkeypatch.setattr("training.laptop.download._read_ahead", read)
    (tmp_path / "a.part").write_bytes(b"y" * part_bytes)
    download.all([("logs/rank-0.log", tmp_path / "a", sha256_of(file))])
    assert (tmp_path / "a").read_bytes() == file.read_bytes() and owed == owed_then


def test_files_have_a_number_and_what_is_read_whole_has_a_size(connect, server, run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("training.laptop.fetch.METADATA_BYTES", 1000)
    server.files.announced = {"plan.json": 1001}
    with pytest.raises(FetchError, match=r"plan\.json has 1001 B, more than 1000 B"):
        fetch_remote(connect(), str(run), tmp_path / "home")
    monkeypatch.setattr("training.laptop.download.MOST_FILES", 30)
    for n in range(30):
        (run / "logs" / f"{n}.log").touch()
    with pytest.raises(FetchError, match="more than 30 files"):
        fetch_remote(connect(), str(run), tmp_path / "other")


@pytest.mark.parametrize("text", ["{", "[]", '{"base_model": 1}', "null"])
def test_papers_that_are_none_are_a_sentence(connect, run: Path, tmp_path: Path, text: str):
    folder = run / "checkpoints" / "step-2"
    (folder / "trainer_state.json").write_text(text)
    (folder / "SHA256SUMS").write_text(sums_text(sums_of(folder)))
    with pytest.raises(FetchError, match=r"holds something else|another base model"):
        fetch_remote(connect(), str(run), tmp_path / "home")
    (run / "plan.json").write_text(text[:1])
    with pytest.raises(FetchError, match=r"plan\.json cannot be read"):
        fetch_remote(connect(), str(run), tmp_path / "other")


def test_watching_brings_every_new_checkpoint_until_the_run_is_over(node, run: Path, tmp_path: Path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    over = tmp_path / "over"
    (tools / "systemctl").write_text(f"#!/bin/sh\ntest -e {over} || echo active\n")  # of the supervisor's unit
    (tools / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr("training.laptop.fetch.WATCH_EVERY_S", 0.05)
    monkeypatch.setattr("training.laptop.fetch.make_page", lambda folder: None)
    monkeypatch.chdir(tmp_path)
    head = RemoteHead(node)
    head.runs = run.parent

    def say(state: str) -> None:
        write_atomically(run / "status.json", status_text(Status(run.name, state)))  # type: ignore[arg-type]

    def train() -> None:
        home = tmp_path / "runs" / run.name / "checkpoints"
        for step in (4, 6):
            name = f"checkpoints/step-{step}"
            make_checkpoint(tmp_path / "made", step).rename(run / name)
            until((home / f"step-{step}").exists, f"step {step} at home")
        say("finished")
        over.touch()

    say("running")
    trainer = threading.Thread(target=train, daemon=True)
    with closing(head):
        first = fetch.collect_results(head, run.name)
        trainer.start()
        fetch.fetch_until_over(head, run.name, first)
    trainer.join(1)
    home = tmp_path / "runs" / run.name
    assert sorted(path.name for path in (home / "checkpoints").iterdir()) == ["step-2", "step-4", "step-6"]
    assert (home / "adapter").readlink() == Path("checkpoints/step-6/adapter")
    assert json.loads((home / "status.json").read_text())["state"] == "finished"


def test_another_base_model_than_planned_is_refused(connect, run: Path, tmp_path: Path):
    (run / "plan.json").write_text(json.dumps({"base_model_hash": "c" * 64}))
    with pytest.raises(FetchError, match="another base model"):
        fetch_remote(connect(), str(run), tmp_path / "home")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (adapter_bytes(b=b"\x00\x00"), "every LoRA B is zero"),
        (adapter_bytes(rank=2), "no adapter of rank 4 has"),
        (adapter_bytes(width=0), "it is empty"),
        (adapter_bytes(drop="v_proj.lora_B.weight"), "do not come in pairs"),
        (adapter_bytes()[:-10], "not as long as its header says"),
        (b"\xff" * 64, "not a safetensors file"),
        ((17 << 20).to_bytes(8, "little") + b"{" + b" " * (17 << 20), "not a safetensors file"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not a safetensors file"),
    ],
    ids=["zero B", "another rank", "empty tensors", "B missing", "cut short", "no safetensors", "large", "deep"],
)
def test_an_adapter_that_would_do_nothing_or_not_load_is_refused(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FetchError, match=words):
        verify_adapter(path, {"r": RANK})


def test_a_good_adapter_passes(tmp_path: Path):
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(adapter_bytes())
    verify_adapter(path, {"r": RANK})


EXPERTS = {"r": 16, "rank_pattern": {r"mlp\\.experts\\.down_proj": 8}, "target_parameters": ["mlp.experts.down_proj"]}
LAYER = "base_model.model.model.layers.0"


def of_experts(inner: int, other: int = 0) -> bytes:
    pair = {"lora_A.weight": [inner, 64], "lora_B.weight": [48, other or inner]}
    plain = {"lora_A.weight": [16, 64], "lora_B.weight": [48, 16]}
    tensors = {f"{LAYER}.mlp.experts.base_layer.{name}": shape for name, shape in pair.items()}
    return safetensors_of(
        tensors | {f"{LAYER}.mlp.shared_expert.up_proj.{name}": shape for name, shape in plain.items()}
    )


def test_the_matrices_of_experts_lie_side_by_side(tmp_path: Path):
    path = tmp_path / "adapter_model.safetensors"
    named_by_weight = {"target_parameters": [*EXPERTS["target_parameters"], "mlp.shared_expert.up_proj.weight"]}
    for inner in (8, 32, 1024):
        path.write_bytes(of_experts(inner))
        verify_adapter(path, EXPERTS | named_by_weight)
    for inner, other, words in (
        (0, 0, "it is empty"),
        (12, 0, "no adapter of rank 16 has"),
        (32, 24, "does not go with"),
    ):
        path.write_bytes(of_experts(inner, other))
        with pytest.raises(FetchError, match=words):
            verify_adapter(path, EXPERTS)
    path.write_bytes(of_experts(32))
    with pytest.raises(FetchError, match=r"shape \(32, 64\), which no adapter of rank 16 has"):
        verify_adapter(path, {"r": 16})


def safetensors_of(tensors: dict[str, list[int]], value: bytes = b"\x80\x3f") -> bytes:
    """A safetensors file of bf16 tensors of these shapes."""
    header, at = {}, 0
    for name, shape in tensors.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + value * (at // 2)


def test_magnitudes_token_rows_and_whole_modules_belong_to_a_good_adapter(tmp_path: Path):
    path = tmp_path / "adapter_model.safetensors"
    good = {
        "q_proj.lora_A.weight": [RANK, 8],
        "q_proj.lora_B.weight": [8, RANK],
        "q_proj.lora_magnitude_vector": [8],
        "embed_tokens.token_adapter.trainable_tokens_delta": [2, 8],
        "lm_head.weight": [16, 8],
    }
    path.write_bytes(safetensors_of(good))
    verify_adapter(path, {"r": RANK})
    path.write_bytes(safetensors_of({**good, "q_proj.lora_magnitude_vector": [0]}))
    with pytest.raises(FetchError, match=r"lora_magnitude_vector has shape \(0,\), it is empty"):
        verify_adapter(path, {"r": RANK})


def make_full_checkpoint(run: Path, step: int) -> Path:
    """What full fine-tuning leaves: a model in two files."""
    folder = make_checkpoint(run, step)
    shutil.rmtree(folder / "adapter")
    (folder / "model").mkdir()
    shards = {"model-1.safetensors": {"a": [4, 2]}, "model-2.safetensors": {"b": [3]}}
    for name, tensors in shards.items():
        (folder / "model" / name).write_bytes(safetensors_of(tensors))
    index = {"weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model" / "config.json").write_text("{}")
    (folder / "SHA256SUMS").write_text(sums_text(sums_of(folder)))
    return folder


def test_a_whole_model_comes_home_and_is_opened(connect, run: Path, tmp_path: Path):
    there = make_full_checkpoint(run, 10)
    home, open_sftp = tmp_path / "home", connect()
    fetched = fetch_remote(open_sftp, str(run), home)
    assert (fetched.step, fetched.part) == (10, "model")
    for path in (there / "model").iterdir():
        assert (home / "model" / path.name).read_bytes() == path.read_bytes()
    assert not (home / "checkpoints" / "step-10" / "optimizer.safetensors").exists()
    (there / "model" / "model-2.safetensors").unlink()
    (there / "SHA256SUMS").write_text(sums_text(sums_of(there)))
    with pytest.raises(FetchError, match="b is in the index and in no file"):
        fetch_remote(open_sftp, str(run), tmp_path / "other")


def test_the_best_checkpoint_comes_home_where_there_is_one(connect, run: Path, tmp_path: Path, monkeypatch, capsys):
    for step in (4, 6):
        make_checkpoint(run, step)
    (run / "checkpoints" / "best").write_text("step-4\n")
    home, open_sftp = tmp_path / "home", connect()
    fetched = fetch_remote(open_sftp, str(run), home)
    assert (fetched.step, fetched.newest) == (4, 6)
    assert (home / "adapter").readlink() == Path("checkpoints/step-4/adapter")
    assert runs.checkpoint_step(HereHead(run.parent), run.name) == 4
    assert fetch.collect_results(HereHead(run.parent), run.name) == 4
    assert "adapter of step 4, the best by validation loss; the newest is step 6" in capsys.readouterr().out
    (run / "checkpoints" / "best").write_text("step-5\n")  # dropped by hand
    assert fetch_remote(open_sftp, str(run), home).step == fetch_here(run).step == 6
    assert runs.checkpoint_step(HereHead(run.parent), run.name) == 6


def _spoil_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("adapter/adapter_model.safetensors", _spoil_bit),
        ("trainer_state.json", _spoil_bit),
        ("SHA256SUMS", _spoil_bit),
        ("SHA256SUMS", lambda path: path.write_bytes(b"\xff" + path.read_bytes())),
        ("adapter/adapter_config.json", Path.unlink),
    ],
    ids=["adapter", "state", "a digest", "no text", "missing"],
)
def test_a_best_checkpoint_that_was_damaged_at_rest_is_named_and_the_newest_whole_one_comes_home(
    connect, run: Path, capsys, name: str, spoil: Callable[[Path], None]
):
    for step in (4, 6, 8):
        make_checkpoint(run, step)
    (run / "checkpoints" / "best").write_text("step-4\n")
    spoil(run / "checkpoints" / "step-4" / name)
    _spoil_bit(run / "checkpoints" / "step-8" / "adapter" / "adapter_model.safetensors")
    home, open_sftp = run.with_name("home"), connect()
    for fetched in (fetch_remote(open_sftp, str(run), home), fetch_here(run)):
        assert (fetched.step, fetched.newest) == (6, 8)
        best, newest = fetched.damaged
        assert "step-4" in best and "damaged" in best
        assert "step-8/adapter/adapter_model.safetensors" in newest and "damaged" in newest
    assert (home / "adapter").readlink() == Path("checkpoints/step-6/adapter")
    assert fetch.collect_results(HereHead(run.parent), run.name) == 6
    said = capsys.readouterr().out
    assert said.count("passed over: ") == 2 and "adapter of step 6; it is in" in said
    for step in (2, 6):
        _spoil_bit(run / "checkpoints" / f"step-{step}" / "adapter" / "adapter_model.safetensors")
    with pytest.raises(FetchError, match=r"no checkpoint is whole: .*step-4.*step-8.*step-6.*step-2"):
        fetch_remote(open_sftp, str(run), run.with_name("other"))


def test_names_that_lead_out_of_the_folder_are_refused():
    with pytest.raises(ValueError, match="unreadable line"):
        parse_sums(f"{'0' * 64}  ../../etc/passwd\n")


def test_the_newest_checkpoint_is_by_number_and_unfinished_ones_do_not_count():
    assert newest_step(["step-9", "step-10", ".tmp-step-11", "step-x", "superseded-step-12"]) == 10
    assert newest_step([]) is None
