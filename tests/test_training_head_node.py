"""The head over a connection that is really this machine's shell and sftp, and this machine itself."""

from __future__ import annotations

import io
import os
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import paramiko
import pytest

from training.control import runs, start_run
from training.control.head_node import HeadError, HereHead, RemoteHead
from training.control.runs import Target
from training.launch import Launch, LaunchError
from training.recipe import load_recipe
from training.sums import PARTS, sums_of, sums_text


def sh(command: str) -> str:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


class Uploads(paramiko.SFTPServerInterface):
    """Takes files as OpenSSH does, and remembers each one's mode; with `full` it takes none."""

    full = False
    modes: ClassVar[dict[str, int]] = {}

    def open(self, path, flags, attr):
        if Uploads.full:
            return paramiko.SFTP_FAILURE
        try:
            descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        handle = _Upload(flags)
        handle.writefile = os.fdopen(descriptor, "wb")
        handle.path = path
        return handle


class _Upload(paramiko.SFTPHandle):
    path = ""

    def chattr(self, attr):
        paramiko.SFTPServer.set_file_attr(self.path, attr)
        Uploads.modes[self.path] = attr.st_mode
        return paramiko.SFTP_OK


class _AllowAll(paramiko.ServerInterface):
    def check_auth_none(self, username):
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED


class Door:
    """What a RemoteHead asks of a connection: sftp channels, over a real transport."""

    def __init__(self) -> None:
        self.client = self
        self.closed = 0
        ours, theirs = socket.socketpair()
        server = paramiko.Transport(theirs)
        server.add_server_key(paramiko.ECDSAKey.generate())
        server.set_subsystem_handler("sftp", paramiko.SFTPServer, Uploads)
        threading.Thread(target=server.start_server, kwargs={"server": _AllowAll()}, daemon=True).start()
        self.transport = paramiko.Transport(ours)
        self.transport.start_client(timeout=10)
        self.transport.auth_none("root")

    def open_sftp(self) -> paramiko.SFTPClient | None:
        return paramiko.SFTPClient.from_transport(self.transport)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def door() -> Iterator[Door]:
    Uploads.full, Uploads.modes = False, {}
    opened = Door()
    yield opened
    opened.transport.close()


def remote(runs_folder: Path, door: Door) -> RemoteHead:
    head = RemoteHead("te1", lambda: door, lambda _, command: sh(command))
    head.runs = runs_folder
    return head


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "files.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("recipe.toml")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"a=1\n"))
    return path


def test_a_run_is_unpacked_on_the_data_disk_and_nothing_else_is_left(door: Door, tmp_path: Path, archive: Path):
    head = remote(Path("/runs"), door)  # / is a mount point on every machine
    head.put(archive, tmp_path / "it's a run")
    head.put(archive, tmp_path / "it's a run")
    assert (tmp_path / "it's a run" / "recipe.toml").read_text() == "a=1\n"
    assert (tmp_path / "it's a run" / "logs").is_dir()
    assert len(Uploads.modes) == 2, "another name each time, for nobody to guess"
    assert [path for path in Uploads.modes if Path(path).exists()] == []
    assert {stat.S_IMODE(mode) for mode in Uploads.modes.values()} == {0o600}


def test_a_file_that_is_there_already_is_not_written_to(door: Door, tmp_path: Path, archive: Path, monkeypatch):
    planted = Path("/tmp/spotune-guessed")
    planted.write_text("somebody else's")
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    try:
        with pytest.raises(HeadError, match="could not be sent"):
            remote(Path("/runs"), door).put(archive, tmp_path / "run")
    finally:
        planted.unlink(missing_ok=True)
    assert not (tmp_path / "run").exists()


def test_without_its_data_disk_the_head_gets_nothing(door: Door, tmp_path: Path, archive: Path):
    head = remote(tmp_path / "data" / "runs", door)
    with pytest.raises(HeadError, match=rf"^te1: no disk is mounted at {tmp_path}/data, .*base deploy"):
        head.put(archive, tmp_path / "data" / "runs" / "tiny-20260101-000000")
    assert not (tmp_path / "data").exists()


def test_files_that_cannot_be_sent_are_the_heads_trouble_in_words(door: Door, tmp_path: Path, archive: Path):
    Uploads.full = True
    head = remote(Path("/runs"), door)
    with pytest.raises(HeadError, match=r"te1: the run's files could not be sent: .*Failure"):
        head.put(archive, tmp_path / "run")
    assert door.closed


def test_a_head_that_opens_no_channel_is_given_up(door: Door, monkeypatch):
    monkeypatch.setattr("training.control.head_node.ANSWER_S", 0.1)
    head = remote(Path("/runs"), door)
    monkeypatch.setattr(door, "open_sftp", lambda: time.sleep(2))
    with pytest.raises(TimeoutError, match="no answer within"):
        head.open_sftp()


def make_checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step-{step}"
    (folder / "adapter").mkdir(parents=True)
    for name in PARTS:
        (folder / name).write_text(f"{name} of step {step}")
    (folder / "SHA256SUMS").write_text(sums_text(sums_of(folder)))
    return folder


RUN = "tiny-20260131-154500"


@pytest.fixture
def here(tmp_path: Path) -> HereHead:
    (tmp_path / "some (odd) runs' folder" / RUN).mkdir(parents=True)
    return HereHead(tmp_path / "some (odd) runs' folder")


@pytest.mark.parametrize("spoil", ["optimizer.safetensors", "adapter/adapter_config.json", "SHA256SUMS"])
def test_a_resume_goes_by_the_newest_checkpoint_that_is_whole(here: HereHead, spoil: str):
    assert runs.whole_checkpoint(here, RUN) == (None, [])
    for step in (8, 9, 10):
        newest = make_checkpoint(here.runs / RUN, step)
    (newest.parent / ".tmp-step-12").mkdir()
    (newest.parent / "superseded-step-11").mkdir()
    assert runs.whole_checkpoint(here, RUN) == (10, [])
    (newest / spoil).write_text("")
    assert runs.whole_checkpoint(here, RUN) == (9, [10])
    (newest / spoil).unlink()
    assert runs.whole_checkpoint(here, RUN) == (9, [10])


def test_sums_that_leave_a_part_out_make_no_whole_checkpoint(here: HereHead):
    folder = make_checkpoint(here.runs / RUN, 4)
    sums = sums_of(folder)
    del sums["optimizer.safetensors"]
    (folder / "SHA256SUMS").write_text(sums_text(sums))
    assert runs.whole_checkpoint(here, RUN) == (None, [4])


def test_a_supervisor_that_does_not_start_is_said_at_once(here: HereHead):
    (here.runs / RUN / "logs").mkdir()
    launch = Launch(RUN, str(here.runs / RUN), (), "training.finetune", (), sys.executable, {}, here=True)
    began = time.monotonic()
    with pytest.raises(HeadError, match=r"did not start.*supervisor\.log"):
        here.start(launch)  # no code was shipped
    assert time.monotonic() - began < 10


def test_a_command_without_an_end_is_the_heads_trouble(here: HereHead):
    with pytest.raises(HeadError, match="sleep: no end within"):
        here.shell("sleep 5", 0.1)


STAND_IN = """#!/bin/sh
# stands in for `python -m training.tiny FOLDER`, which takes half a minute
[ -e "$(dirname "$0")/broken" ] && exit 7
echo made >> "$(dirname "$0")/calls"
echo weights > "$3/config.json"
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch) -> Target:
    """A place for models with a Python that makes `tiny` at once."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return Target((), str(python), {}, str(tmp_path / "models"), here=True)


def test_tiny_is_made_once_and_again_when_its_code_changed(target: Target, tmp_path: Path, monkeypatch):
    recipe = load_recipe("tiny")
    made = start_run.here_base_model(recipe, target)
    assert start_run.here_base_model(recipe, target) == made
    assert (tmp_path / "calls").read_text().count("made") == 1
    other = tmp_path / "tiny.py"
    other.write_text("another one")
    monkeypatch.setattr(start_run, "TINY", other)
    assert start_run.here_base_model(recipe, target) == made
    assert (tmp_path / "calls").read_text().count("made") == 2


@pytest.mark.parametrize("record", [None, '{"commit": '])
def test_a_half_made_model_is_made_anew(target: Target, tmp_path: Path, record: str | None):
    half = tmp_path / "models" / "tiny"
    half.mkdir(parents=True)
    (half / "config.json").write_text("half")
    if record:
        (half / "spotune-model.json").write_text(record)
    start_run.here_base_model(load_recipe("tiny"), target)
    assert (half / "config.json").read_text() == "weights\n"


def test_a_model_that_cannot_be_made_is_one_sentence(target: Target, tmp_path: Path, monkeypatch):
    (tmp_path / "broken").touch()
    with pytest.raises(LaunchError, match=r"could not be made: training\.tiny ended with 7"):
        start_run.here_base_model(load_recipe("tiny"), target)
    (tmp_path / "broken").unlink()
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(start_run, "MAKING_S", 0.1)
    with pytest.raises(LaunchError, match="was not made within"):
        start_run.here_base_model(load_recipe("tiny"), target)
