"""Fetching over real sftp on the loopback interface: cut, resumed, damaged; and the faults of adapters."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from training.control import attend
from training.control.fetch import (
    FetchError,
    FetchInterrupted,
    fetch_patiently,
    fetch_remote,
    newest_step,
    verify_adapter,
)
from training.control.head_node import RemoteHead
from training.run_folder import Status, status_text, write_atomically
from training.sums import parse_sums

RANK = 4
BASE = "b" * 64


class Files(paramiko.SFTPServerInterface):
    """What a login user other than root may read of this machine's files. After `cut_after` bytes the connection
    is closed, after `silent_after` nothing is answered any more."""

    served = 0
    cut_after: int | None = None
    silent_after: int | None = None
    back = threading.Event()
    transport: paramiko.Transport | None = None

    def list_folder(self, path):
        if not Path(path).is_dir():
            return paramiko.SFTP_NO_SUCH_FILE
        entries = []
        for entry in Path(path).iterdir():
            attributes = paramiko.SFTPAttributes.from_stat(entry.stat())
            attributes.filename = entry.name
            entries.append(attributes)
        return entries

    def stat(self, path):
        if not Path(path).exists():
            return paramiko.SFTP_NO_SUCH_FILE
        return paramiko.SFTPAttributes.from_stat(Path(path).stat())

    lstat = stat

    def open(self, path, flags, attr):
        if not Path(path).is_file():
            return paramiko.SFTP_NO_SUCH_FILE
        if not Path(path).stat().st_mode & 0o004:
            return paramiko.SFTP_PERMISSION_DENIED
        handle = _Counted(flags)
        handle.readfile = Path(path).open("rb")  # noqa: SIM115 - the handle closes it
        return handle


class _Counted(paramiko.SFTPHandle):
    def stat(self):
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))

    def read(self, offset, length):
        data = super().read(offset, length)
        Files.served += len(data)
        if Files.cut_after is not None and Files.served > Files.cut_after and Files.transport:
            Files.transport.close()
        if Files.silent_after is not None and Files.served > Files.silent_after:
            Files.back.wait(30)
        return data


class _AllowAll(paramiko.ServerInterface):
    def check_auth_none(self, username):
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED


@pytest.fixture
def connect() -> Iterator[Callable[[], Callable[[], paramiko.SFTPClient]]]:
    """Connect to a fresh server; gives the function that opens a channel."""
    key = paramiko.ECDSAKey.generate()
    transports: list[paramiko.Transport] = []
    Files.served, Files.cut_after, Files.silent_after = 0, None, None
    Files.back.clear()

    def _connect() -> Callable[[], paramiko.SFTPClient]:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            connection, _ = listener.accept()
            Files.transport = paramiko.Transport(connection)
            Files.transport.add_server_key(key)
            Files.transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Files)
            Files.transport.start_server(server=_AllowAll())

        threading.Thread(target=serve, daemon=True).start()
        client = paramiko.Transport(socket.create_connection(listener.getsockname()))
        client.start_client(timeout=10)
        client.auth_none("root")
        transports.append(client)
        listener.close()
        return lambda: paramiko.SFTPClient.from_transport(client)

    yield _connect
    Files.back.set()
    for transport in transports:
        transport.close()


def adapter_bytes(rank: int = RANK, b: bytes = b"\x01\x3f", width: int = 8, drop: str = "") -> bytes:
    """A safetensors file with two LoRA pairs; bf16."""
    header, data = {}, b""
    for layer in ("q_proj", "v_proj"):
        for side, shape, value in (("A", [rank, width], b"\x80\x3f"), ("B", [width, rank], b)):
            name = f"base_model.model.{layer}.lora_{side}.weight"
            block = value * (shape[0] * shape[1])
            if name.endswith(drop) and drop:
                continue
            header[name] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [len(data), len(data) + len(block)],
            }
            data += block
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def make_checkpoint(run: Path, step: int, big: int = 0, adapter: bytes | None = None) -> Path:
    folder = run / "checkpoints" / f"step-{step}"
    (folder / "adapter").mkdir(parents=True)
    files = {
        "adapter/adapter_model.safetensors": adapter if adapter is not None else adapter_bytes(),
        "adapter/adapter_config.json": json.dumps({"r": RANK}).encode(),
        "trainer_state.json": json.dumps({"step": step, "base_model": BASE}).encode(),
        "optimizer.safetensors": os.urandom(big or 1000),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sums = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items())]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as a head has it."""
    folder = tmp_path / "head" / "tiny-20260131-154500"
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


def test_fetching_again_moves_no_checkpoint_twice(connect, run: Path, tmp_path: Path):
    make_checkpoint(run, 10, big=300_000)
    open_sftp = connect()
    assert fetch_remote(open_sftp, str(run), tmp_path / "home", full=True).bytes_moved > 300_000
    for full in (True, False):
        assert fetch_remote(open_sftp, str(run), tmp_path / "home", full=full).bytes_moved < 1000
    assert (tmp_path / "home" / "checkpoints" / "step-10" / "optimizer.safetensors").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # paramiko's own
def test_a_cut_connection_is_gone_on_with_where_it_broke(connect, run: Path, tmp_path: Path):
    size = 24 << 20
    make_checkpoint(run, 10, big=size)
    home = tmp_path / "home"
    Files.cut_after = 12 << 20
    with pytest.raises((OSError, EOFError, paramiko.SSHException)):
        fetch_remote(connect(), str(run), home, full=True)
    part = home / "checkpoints" / ".step-10" / "optimizer.safetensors.part"
    kept = part.stat().st_size
    assert kept > 1 << 20
    assert not (home / "checkpoints" / "step-10").exists()
    Files.cut_after = None
    fetched = fetch_remote(connect(), str(run), home, full=True)
    assert fetched.step == 10
    assert fetched.bytes_moved < size - kept + 10_000


def test_a_broken_connection_is_made_anew_by_itself(connect, run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("training.control.fetch.RETRY_AFTER_S", 0)
    broken, whole = connect(), connect()
    broken().get_channel().get_transport().close()
    doors = [broken]

    def open_sftp() -> paramiko.SFTPClient:
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
    assert 300_000 < fetch_remote(open_sftp, str(run), home, full=True).bytes_moved < 301_000
    there = run / "checkpoints" / "step-10"
    assert (step / "optimizer.safetensors").read_bytes() == (there / "optimizer.safetensors").read_bytes()
    assert (step / "SHA256SUMS").read_bytes() == (there / "SHA256SUMS").read_bytes()


def test_a_step_that_was_made_again_takes_the_place_of_the_one_at_home(connect, run: Path, tmp_path: Path):
    home, open_sftp = tmp_path / "home", connect()
    fetch_remote(open_sftp, str(run), home)
    shutil.rmtree(run / "checkpoints" / "step-2")
    make_checkpoint(run, 2, adapter=adapter_bytes(b=b"\x02\x3f"))
    fetch_remote(open_sftp, str(run), home)
    name = "checkpoints/step-2/adapter/adapter_model.safetensors"
    assert (home / name).read_bytes() == (run / name).read_bytes()
    assert [path.name for path in (home / "checkpoints").iterdir()] == ["step-2"]


def test_a_file_the_login_user_may_not_read_is_named_and_no_broken_connection(connect, run: Path, tmp_path: Path):
    path = run / "checkpoints" / "step-2" / "adapter" / "adapter_model.safetensors"
    path.chmod(0o600)
    with pytest.raises(FetchError, match=rf"{path} may not be read.*chmod -R a\+rX {run}"):
        fetch_patiently(connect(), lambda: pytest.fail("nothing broke"), str(run), tmp_path / "home")


def test_a_file_that_is_gone_for_good_is_named(connect, run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("training.control.fetch.RETRY_AFTER_S", 0)
    path = run / "checkpoints" / "step-2" / "adapter" / "adapter_model.safetensors"
    path.unlink()
    with pytest.raises(FetchError, match=f"{path} is not there any more"):
        fetch_patiently(connect(), lambda: pytest.fail("nothing broke"), str(run), tmp_path / "home")


def test_a_folder_at_home_that_cannot_be_made_is_no_broken_connection(connect, run: Path, tmp_path: Path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(FetchError, match=r"home.* on this machine"):
        fetch_patiently(connect(), lambda: pytest.fail("nothing broke"), str(run), tmp_path / "home")


def test_a_head_that_falls_silent_ends_the_fetch_in_words(connect, run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("training.control.fetch.SILENCE_S", 0.5)
    monkeypatch.setattr("training.control.fetch.TRIES", 1)
    make_checkpoint(run, 10, big=8 << 20)
    Files.silent_after = 2 << 20
    began = time.monotonic()
    with pytest.raises(FetchInterrupted, match=r"the head went away .* fetch again to go on"):
        fetch_patiently(connect(), lambda: None, str(run), tmp_path / "home", full=True)
    assert time.monotonic() - began < 10


class Door:
    """What a RemoteHead asks of a connection."""

    def __init__(self, open_sftp: Callable[[], paramiko.SFTPClient]) -> None:
        self.client = self
        self.open_sftp = open_sftp
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_watching_brings_every_new_checkpoint_until_the_run_is_over(connect, run: Path, tmp_path: Path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "systemctl").write_text("#!/bin/sh\nexit 0\n")  # the supervisor's unit is active
    (tools / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr("training.control.attend.WATCH_EVERY_S", 0.05)
    monkeypatch.chdir(tmp_path)
    door = Door(connect())
    head = RemoteHead("te1", lambda: door, lambda _, command: sh(command))
    head.runs = run.parent

    def say(state: str) -> None:
        write_atomically(run / "status.json", status_text(Status(run.name, state)))  # type: ignore[arg-type]

    def train() -> None:
        home = tmp_path / "runs" / run.name / "checkpoints"
        for step in (4, 6):
            name = f"checkpoints/step-{step}"
            make_checkpoint(tmp_path / "made", step).rename(run / name)
            deadline = time.monotonic() + 20
            while not (home / f"step-{step}").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        say("finished")

    say("running")
    first = attend.bring_home(head, run.name)
    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    attend.watch_home(head, run.name, first)
    trainer.join(1)
    home = tmp_path / "runs" / run.name
    assert sorted(path.name for path in (home / "checkpoints").iterdir()) == ["step-2", "step-4", "step-6"]
    assert (home / "adapter").readlink() == Path("checkpoints/step-6/adapter")
    assert json.loads((home / "status.json").read_text())["state"] == "finished"


def sh(command: str) -> str:
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout


def test_another_base_model_than_planned_is_refused(connect, run: Path, tmp_path: Path):
    (run / "plan.json").write_text(json.dumps({"base_model_hash": "c" * 64}))
    with pytest.raises(FetchError, match="another base model"):
        fetch_remote(connect(), str(run), tmp_path / "home")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (adapter_bytes(b=b"\x00\x00"), "every LoRA B is zero"),
        (adapter_bytes(rank=2), "no adapter of rank 4 has"),
        (adapter_bytes(width=0), "no adapter of rank 4 has"),
        (adapter_bytes(drop="v_proj.lora_B.weight"), "do not come in pairs"),
        (adapter_bytes()[:-10], "not as long as its header says"),
        (b"\xff" * 64, "not a safetensors file"),
    ],
    ids=["zero B", "another rank", "empty tensors", "B missing", "cut short", "no safetensors"],
)
def test_an_adapter_that_would_do_nothing_or_not_load_is_refused(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FetchError, match=words):
        verify_adapter(path, RANK)


def test_a_good_adapter_passes(tmp_path: Path):
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(adapter_bytes())
    verify_adapter(path, RANK)


def test_names_that_lead_out_of_the_folder_are_refused():
    with pytest.raises(ValueError, match="unreadable line"):
        parse_sums(f"{'0' * 64}  ../../etc/passwd\n")


def test_the_newest_checkpoint_is_by_number_and_unfinished_ones_do_not_count():
    assert newest_step(["step-9", "step-10", ".tmp-step-11", "step-x", "superseded-step-12"]) == 10
    assert newest_step([]) is None
