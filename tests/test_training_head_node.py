"""The head over a connection that is really this machine's shell and sftp, and this machine itself."""

from __future__ import annotations

import io
import json
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

from training.adapter import at_head
from training.control import preparing, resume_run, runs, start_run
from training.control.head_node import HeadError, HereHead, RemoteHead
from training.control.place import Place, Target
from training.control.preparing import Order
from training.control.verify import FetchError
from training.data import DataError
from training.launch import Launch, LaunchError, launch_text
from training.recipe import load_recipe, read_recipe
from training.run_folder import CLAIM, Status, status_text
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
    (newest.with_name("step-9") / "adapter" / "more").touch()
    assert runs.whole_checkpoint(here, RUN) == (8, [10, 9])


def test_a_checkpoint_with_a_whole_model_is_one_too(here: HereHead):
    folder = make_checkpoint(here.runs / RUN, 4)
    (folder / "adapter").rename(folder / "model")
    (folder / "model" / "adapter_config.json").rename(folder / "model" / "config.json")
    (folder / "SHA256SUMS").write_text(sums_text(sums_of(folder)))
    assert runs.whole_checkpoint(here, RUN) == (4, [])


class Stands(HereHead):
    """This machine, but runs on it are only made ready."""

    def start(self, launch: Launch) -> None:
        self.started = launch


@pytest.fixture
def ended(tmp_path: Path) -> Stands:
    """A machine with a run that ended at step 4."""
    head = Stands(tmp_path)
    run = tmp_path / RUN
    (run / "logs").mkdir(parents=True)
    make_checkpoint(run, 4)
    launch = Launch(RUN, str(run), (), "training.finetune", (), sys.executable, {}, here=True)
    (run / "launch.json").write_text(launch_text(launch))
    (run / "recipe.toml").write_text(load_recipe("tiny").to_toml())
    (run / "status.json").write_text(status_text(Status(RUN, "failed")))
    return head


def test_a_resume_waits_until_the_reports_of_the_last_try_are_made(ended: Stands, monkeypatch):
    words = ["-m", "training.supervision.supervise", "--run", str(ended.runs / RUN)]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)", *words]) as supervisor:
        (ended.runs / RUN / "status.json").write_text(status_text(Status(RUN, "failed", supervisor_pid=supervisor.pid)))
        monkeypatch.setattr(ended, "start", lambda launch: setattr(ended, "started", supervisor.poll()))
        assert resume_run.resume(Place(ended), RUN, None, {}, force=False) == RUN
    assert ended.started == 0


def test_a_forced_resume_goes_by_the_changed_recipe_and_keeps_the_one_before(ended: Stands, capsys):
    run, before = ended.runs / RUN, load_recipe("tiny")
    overrides = {"optimizer.lr": "0.5", "save_every": "7"}
    assert resume_run.resume(Place(ended), RUN, None, overrides, force=True) == RUN
    assert ended.started.arguments == ("--resume", "--force")
    after = read_recipe(run / "recipe.toml")
    assert (after.optimizer.lr, after.save_every) == (0.5, 7)
    assert read_recipe(run / "recipe.before-4.toml") == before
    assert f"from step 4 on: optimizer.lr 0.5 instead of {before.optimizer.lr}" in capsys.readouterr().out


PREPARED = {"report": {"bad": 2}}


@pytest.fixture
def prepared(ended: Stands, monkeypatch) -> list[tuple[int, Order, bool]]:
    """For each preparation of the run's data: the max_length it found in the recipe, its order, if the run went on."""
    seen: list[tuple[int, Order, bool]] = []

    def prepare(head: Stands, launch: Launch, order: Order) -> dict:
        recipe = read_recipe(Path(launch.run_dir) / "recipe.toml")
        seen.append((recipe.max_length, order, hasattr(head, "started")))
        if recipe.max_length == 9:
            raise DataError("nothing to learn within 9 tokens")
        return PREPARED

    monkeypatch.setattr(preparing, "prepare", prepare)
    (ended.runs / RUN / "data").mkdir()
    (ended.runs / RUN / "data" / "report.json").write_text(json.dumps(PREPARED))
    return seen


def test_a_resume_that_changes_the_data_prepares_them_again_as_they_were_before_it_starts(ended: Stands, prepared):
    place = Place(ended)
    resume_run.resume(place, RUN, None, {"optimizer.lr": "0.5", "seed": "7", "save_every": "3"}, force=True)
    assert prepared == [], "none of these decides what the data are"
    del ended.started
    resume_run.resume(place, RUN, None, {"max_length": "77"}, force=True)
    assert prepared.pop() == (77, Order(skip_bad=True), False) and ended.started
    (ended.runs / RUN / "data" / "train.hub").write_text("owner/name")
    (ended.runs / RUN / "data" / "report.json").write_text('{"report": {"bad": 0}}')
    for key, value in (("batching", "padded"), ("train_on", "all"), ("pad_token", "x"), ("validation.fraction", "0.2")):
        resume_run.resume(place, RUN, None, {key: value}, force=True)
        assert prepared.pop()[1] == Order(from_hub=True), key
    resume_run.resume(place, RUN, None, {"seed": "8"}, force=True)
    assert prepared.pop(), "the seed chooses what is held out"


def test_a_resume_whose_data_cannot_be_prepared_leaves_the_recipe_as_it_was(ended: Stands, prepared):
    before = (ended.runs / RUN / "recipe.toml").read_text()
    with pytest.raises(DataError, match="within 9 tokens"):
        resume_run.resume(Place(ended), RUN, None, {"max_length": "9"}, force=True)
    assert not hasattr(ended, "started")
    assert (ended.runs / RUN / "recipe.toml").read_text() == before
    assert not list((ended.runs / RUN).glob("recipe.before-*"))


def test_what_is_not_computed_may_change_without_force(ended: Stands):
    resume_run.resume(Place(ended), RUN, None, {"save_every": "7", "strategy": "zero2"}, force=False)
    assert ended.started.arguments == ("--resume",)
    assert read_recipe(ended.runs / RUN / "recipe.toml").strategy == "zero2"
    with pytest.raises(LaunchError, match=r"keeps its recipe; this would be optimizer\.lr 0\.5 instead of .* --force"):
        resume_run.resume(Place(ended), RUN, None, {"optimizer.lr": "0.5"}, force=False)
    assert read_recipe(ended.runs / RUN / "recipe.toml").optimizer.lr != 0.5


def test_a_finished_run_goes_on_only_to_more_steps(ended: Stands):
    (ended.runs / RUN / "status.json").write_text(status_text(Status(RUN, "finished")))
    place = Place(ended)
    assert resume_run.resume(place, RUN, None, {"optimizer.lr": "0.5"}, force=True) is None
    assert resume_run.resume(place, RUN, None, {"steps": "999"}, force=True) == RUN
    assert read_recipe(ended.runs / RUN / "recipe.toml").steps == 999


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


@pytest.mark.parametrize("setting", ["lora.rank=8", "lora.targets=['q_proj']", "tuning=full", "lora.dora=true"])
def test_other_tensors_are_refused_even_by_force_before_anything_is_changed(setting: str):
    key, _, value = setting.partition("=")
    with pytest.raises(LaunchError, match=rf"^{key} cannot change within a run"):
        resume_run.changed_recipe(load_recipe("tiny").to_toml(), {key: value}, step=4, force=True)


def test_a_plan_that_was_cut_is_said_in_one_sentence(tmp_path, door):
    folder = tmp_path / "runs" / "tiny-20260131-154500"
    folder.mkdir(parents=True)
    head = remote(tmp_path / "runs", door)
    assert runs.plan_of(head, folder.name) == {}
    (folder / "plan.json").write_text('{"predicted": {"min')
    with pytest.raises(LaunchError, match=r"tiny-20260131-154500: its plan\.json on te1 cannot be read"):
        runs.predicted(head, folder.name)


def test_a_merged_model_of_another_start_of_the_same_id_is_not_brought_home(tmp_path, door, monkeypatch):
    monkeypatch.setattr(at_head, "LOCAL_RUNS", tmp_path / "home")
    theirs, mine = (tmp_path / where / "tiny-20260131-154500" / CLAIM for where in ("runs", "home"))
    for claim in (theirs, mine):
        claim.parent.mkdir(parents=True)
        claim.write_text("one start\n")
    head = remote(tmp_path / "runs", door)
    at_head.refuse_another_run(head, theirs.parent.name)
    theirs.write_text("another\n")
    with pytest.raises(FetchError, match="is not an earlier copy of this run"):
        at_head.refuse_another_run(head, theirs.parent.name)
