"""The head over a real ssh connection to this machine, and this machine itself."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import stat
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from inventory.node_program import ProgramError
from tests.support.run_folders import make_run, supervisor_of
from tests.support.waiting import until
from training.data.sample import DataError
from training.laptop import base_model, open_cluster, preparing, rental, resume_run, runs, start_run
from training.laptop.adapter import tuned_model
from training.laptop.head_node import HeadError, HereHead, RemoteHead
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session
from training.laptop.preparing import DataRequest
from training.models.names import load_recipe
from training.plan.facts import NodeHardware
from training.plan.refit import parse_members
from training.recipe.reading import read_recipe
from training.run.checkpoint_files import FetchError, planned_base_models
from training.run.folder import CLAIM, Status, status_text
from training.run.launch import Host, Launch, LaunchError, launch_text
from training.text.files import ORIGIN, PARTS, sums_of, sums_text
from training.text.problems import AdapterError


@pytest.fixture
def head(node) -> Iterator[RemoteHead]:
    """This machine over ssh, where `/`, a mount point on every machine, is its data disk."""
    with closing(RemoteHead(node)) as opened:
        opened.runs = Path("/runs")
        yield opened


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "files.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("recipe.toml")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"a=1\n"))
    return path


def test_a_run_comes_to_all_nodes_or_stays_on_the_head_alone(node, tmp_path: Path, monkeypatch):
    class There(RemoteHead):
        def __init__(self, node, deploy=""):
            super().__init__(node, deploy)
            self.runs = Path("/runs")

    monkeypatch.setattr(open_cluster, "RemoteHead", There)
    (run := tmp_path / "tiny-20260101-000000").mkdir()
    (run / "logs").mkdir()
    (run / "recipe.toml").write_text("a=1")
    launch = Launch(run.name, str(run), (Host("te1", "127.0.0.1", 1),), "m", (), "python", {})
    with closing(There(node)) as head:
        Session(head, (node, node)).copy_run(launch)
        assert sorted(path.name for path in run.iterdir()) == ["logs", "recipe.toml"]
        with pytest.raises(HeadError):
            Session(head, (node, node, replace(node, port=1))).copy_run(launch)
        assert not run.exists()  # the second node's folder is the head's here


def test_a_run_is_unpacked_on_the_data_disk_and_nothing_else_is_left(head, server, tmp_path: Path, archive: Path):
    head.put(archive, tmp_path / "it's a run")
    head.put(archive, tmp_path / "it's a run")
    assert (tmp_path / "it's a run" / "recipe.toml").read_text() == "a=1\n"
    assert (tmp_path / "it's a run" / "logs").is_dir()
    modes = server.files.modes
    assert len(modes) == 2, "another name each time, for nobody to guess"
    assert [path for path in modes if Path(path).exists()] == []
    assert {stat.S_IMODE(mode) for mode in modes.values()} == {0o600}


def test_a_file_that_is_there_already_is_not_written_to(head, tmp_path: Path, archive: Path, monkeypatch):
    planted = Path("/tmp/spotune-guessed")
    planted.write_text("somebody else's")
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    try:
        with pytest.raises(HeadError, match="could not be sent"):
            head.put(archive, tmp_path / "run")
    finally:
        planted.unlink(missing_ok=True)
    assert not (tmp_path / "run").exists()


def test_without_its_data_disk_the_head_gets_nothing(head, tmp_path: Path, archive: Path):
    head.runs = tmp_path / "data" / "runs"
    with pytest.raises(
        HeadError, match=rf"^te1: no disk is mounted at {tmp_path}/data, .*on a new machine, .* base deploy mounts"
    ):
        head.put(archive, tmp_path / "data" / "runs" / "tiny-20260101-000000")
    assert not (tmp_path / "data").exists()


def test_files_that_cannot_be_sent_are_the_heads_trouble_in_words(head, server, tmp_path: Path, archive: Path):
    server.files.full = True
    with pytest.raises(HeadError, match=r"te1: the run's files could not be sent: .*Failure"):
        head.put(archive, tmp_path / "run")
    until(lambda: not server.transports[0].is_active(), "the connection that failed is closed", 5)


def test_a_head_that_opens_no_channel_is_given_up(head, server, monkeypatch):
    head.shell("true")
    server.silent = True
    monkeypatch.setattr("training.laptop.head_node.ANSWER_S", 0.1)
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

    def start(self, launch: Launch, *, early: bool = False) -> None:
        self.started = launch


@pytest.fixture
def ended(tmp_path: Path, monkeypatch) -> Stands:
    """A machine with a run that ended at step 4, and its base model."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    head = Stands(tmp_path)
    run = tmp_path / RUN
    (run / "logs").mkdir(parents=True)
    make_checkpoint(run, 4)
    launch = Launch(RUN, str(run), (), "training.node.finetune", (), sys.executable, {}, here=True)
    (base := Path(Session(head).launch_of(RUN, launch.module).models) / "tiny").mkdir(parents=True)
    assert base.is_relative_to(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (base / name).touch()
    (run / "launch.json").write_text(launch_text(launch))
    (run / "recipe.toml").write_text(load_recipe("tiny").to_toml())
    (run / "status.json").write_text(status_text(Status(RUN, "failed")))
    return head


def test_a_resume_waits_until_the_reports_of_the_last_try_are_made(ended: Stands, monkeypatch):
    pauses = []
    with supervisor_of(ended.runs / RUN) as supervisor:

        def pause(seconds):
            pauses.append(seconds)
            if len(pauses) == 3:
                supervisor.communicate()  # its input ends, and so does it

        monkeypatch.setattr("training.laptop.follow.time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
        (ended.runs / RUN / "status.json").write_text(status_text(Status(RUN, "failed", supervisor_pid=supervisor.pid)))
        monkeypatch.setattr(ended, "start", lambda launch, early: setattr(ended, "started", supervisor.poll()))
        assert resume_run.resume(Session(ended), RUN, "", {}, force=False) == RUN
    assert (ended.started, len(pauses)) == (0, 3)


def test_a_run_whose_base_model_is_gone_does_not_go_on(ended: Stands):
    shutil.rmtree(Path.home() / ".cache")
    with pytest.raises(LaunchError, match=f"^the base model of {RUN} is gone: .* --model tiny .* puts it back$"):
        resume_run.resume(Session(ended), RUN, "", {}, force=False)
    assert not hasattr(ended, "started")


def test_a_resume_ships_todays_code_alone(ended: Stands):
    """A module of other code beside today's would be imported with it."""
    run = ended.runs / RUN
    (run / "training" / "strategies").mkdir(parents=True)
    (run / "training" / "strategies" / "zero3.py").write_text("from training.cost.strategies import zero3 as cost\n")
    resume_run.resume(Session(ended), RUN, "", {}, force=False)
    assert not (run / "training" / "strategies").exists() and (run / "training" / "node" / "finetune.py").exists()


def test_a_run_here_is_alive_while_its_supervisor_is(here: HereHead):
    (here.runs / RUN).mkdir(parents=True, exist_ok=True)
    with supervisor_of(here.runs / RUN) as supervisor:
        status = Status(RUN, "running", supervisor_pid=supervisor.pid)
        (here.runs / RUN / "status.json").write_text(status_text(status))
        seen = runs.look(here, RUN)
        assert (seen.state, seen.active) == ("running", True)
    assert runs.look(here, RUN).state == "lost"


@pytest.mark.parametrize(
    ("now", "waits", "takes"),
    [
        (("10.0.0.1", "10.0.0.2", "10.0.0.3"), False, True),
        (("10.0.0.1", "10.0.0.9"), False, True),  # in place of one that is taken back
        (("10.0.0.1",), False, False),  # one of its nodes would be left out
        (("10.0.0.1",), True, True),
        (("10.0.0.1", "10.0.0.2"), True, False),  # it has them
    ],
)
def test_a_run_that_goes_on_takes_in_more_nodes_and_one_that_waits_any(ended: Stands, monkeypatch, now, waits, takes):
    def launch_on(addresses):
        hosts = tuple(Host(f"te{n}", address, 1) for n, address in enumerate(addresses, 1))
        return replace(runs.read_launch(ended, RUN), hosts=hosts)

    run, session = ended.runs / RUN, Session(ended)
    (run / "launch.json").write_text(launch_text(launch_on(("10.0.0.1", "10.0.0.2"))))
    (run / "machines.json").touch()
    monkeypatch.setattr(Session, "launch_of", lambda *_: launch_on(now))

    def has(_, launch):
        return tuple(NodeHardware(host.name, 1, (), 2.0**34) for host in launch.hosts)

    monkeypatch.setattr(open_cluster, "hardware_of_nodes", has)
    assert resume_run.admit(session, RUN, waits=waits) == takes
    asked = run / "members.json"
    hosts = parse_members(asked.read_text()).hosts if asked.exists() else ()
    assert tuple(host.private_address for host in hosts) == (now if takes else ())


def test_a_forced_resume_goes_by_the_changed_recipe_and_keeps_the_one_before(ended: Stands, capsys):
    run, before = ended.runs / RUN, load_recipe("tiny")
    overrides = {"optimizer.lr": "0.5", "save_every": "7"}
    assert resume_run.resume(Session(ended), RUN, "", overrides, force=True) == RUN
    assert ended.started.arguments == ("--resume", "--force")
    after = read_recipe(run / "recipe.toml")
    assert (after.optimizer.lr, after.save_every) == (0.5, 7)
    assert read_recipe(run / "recipe.before-4.toml") == before
    assert f"from step 4 on: optimizer.lr 0.5 instead of {before.optimizer.lr}" in capsys.readouterr().out


def test_what_a_forced_resume_trains_from_another_base_model_is_what_a_fetch_takes_and_so_is_what_was(ended: Stands):
    run, hashes = ended.runs / RUN, ["a" * 64, "b" * 64, "c" * 64]
    (run / "plan.json").write_text(json.dumps({"base_model_hash": hashes[0], "model_dir": "tiny"}))
    sealed = Path(Session(ended).launch_of(RUN, "").models) / "tiny" / ORIGIN
    sealed.write_text(json.dumps({"hash": hashes[1]}))
    resume_run.resume(Session(ended), RUN, "", {}, force=False)
    assert planned_base_models(run) == {hashes[0]}
    for number in (1, 2, 2):
        sealed.write_text(json.dumps({"hash": hashes[number]}))
        resume_run.resume(Session(ended), RUN, "", {}, force=True)
        assert planned_base_models(run) == {*hashes[: number + 1]}


PREPARED = {"report": {"bad": 2}}


@pytest.fixture
def prepared(ended: Stands, monkeypatch) -> list[tuple[int, DataRequest, bool]]:
    """For each preparation of the run's data: the max_length it found in the recipe, its order, if the run went on."""
    seen: list[tuple[int, DataRequest, bool]] = []

    def prepare(head: Stands, launch: Launch, order: DataRequest) -> dict:
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
    place = Session(ended)
    resume_run.resume(place, RUN, "", {"optimizer.lr": "0.5", "seed": "7", "save_every": "3"}, force=True)
    assert prepared == [], "none of these decides what the data are"
    del ended.started
    resume_run.resume(place, RUN, "", {"max_length": "77"}, force=True)
    assert prepared.pop() == (77, DataRequest(skip_bad=True), False) and ended.started
    (ended.runs / RUN / "data" / "train.hub").write_text("owner/name")
    (ended.runs / RUN / "data" / "report.json").write_text('{"report": {"bad": 0}}')
    for key, value in (("batching", "padded"), ("train_on", "all"), ("pad_token", "x"), ("validation.fraction", "0.2")):
        resume_run.resume(place, RUN, "", {key: value}, force=True)
        assert prepared.pop()[1] == DataRequest(from_hub=True), key
    resume_run.resume(place, RUN, "", {"seed": "8"}, force=True)
    assert prepared.pop(), "the seed chooses what is held out"


def test_a_resume_whose_data_cannot_be_prepared_leaves_the_recipe_as_it_was(ended: Stands, prepared):
    before = (ended.runs / RUN / "recipe.toml").read_text()
    with pytest.raises(DataError, match="within 9 tokens"):
        resume_run.resume(Session(ended), RUN, "", {"max_length": "9"}, force=True)
    assert not hasattr(ended, "started")
    assert (ended.runs / RUN / "recipe.toml").read_text() == before
    assert not list((ended.runs / RUN).glob("recipe.before-*"))


@pytest.mark.parametrize(
    ("goes_on", "seconds"),
    [("as it was", 2.0 * (300 - 4)), ("on another machine", 0), ("with another strategy", 0), ("with no step", 0)],
)
def test_a_resume_is_given_the_time_its_last_steps_took_where_it_goes_on_as_it_was(
    ended: Stands, monkeypatch, goes_on: str, seconds: float
):
    """The plan of this run knows no time."""
    covered = []
    monkeypatch.setattr(rental, "extend_for_plan", lambda cluster, needed: covered.append(needed))
    row = {"step": 5, "total_steps": 300, "loss": 1.0, "lr": 0.1, "tokens_per_s": 9.0, "memory_gib": 1.0}
    told = "" if goes_on == "with no step" else "".join(json.dumps(row | {"step_s": s}) + "\n" for s in (1.0, 3.0))
    (ended.runs / RUN / "metrics.jsonl").write_text(told)
    launch = Session(ended).launch_of(RUN, "training.node.finetune")
    hosts = (Host("localhost", "127.0.0.1", 9),) if goes_on == "on another machine" else launch.hosts
    (ended.runs / RUN / "launch.json").write_text(launch_text(replace(launch, hosts=hosts)))
    overrides = {"strategy": "zero2"} if goes_on == "with another strategy" else {}
    resume_run.resume(Session(ended), RUN, "", overrides, force=False)
    assert covered == [seconds]


def test_what_is_not_computed_may_change_without_force(ended: Stands):
    resume_run.resume(Session(ended), RUN, "", {"save_every": "7", "strategy": "zero2"}, force=False)
    assert ended.started.arguments == ("--resume",)
    assert read_recipe(ended.runs / RUN / "recipe.toml").strategy == "zero2"
    with pytest.raises(LaunchError, match=r"keeps its recipe; this would be optimizer\.lr 0\.5 instead of .* --force"):
        resume_run.resume(Session(ended), RUN, "", {"optimizer.lr": "0.5"}, force=False)
    assert read_recipe(ended.runs / RUN / "recipe.toml").optimizer.lr != 0.5


def test_a_finished_run_goes_on_only_to_more_steps(ended: Stands):
    (ended.runs / RUN / "status.json").write_text(status_text(Status(RUN, "finished")))
    place = Session(ended)
    for overrides, force in (({}, False), ({"steps": "999"}, False), ({"optimizer.lr": "0.5"}, True)):
        with pytest.raises(LaunchError) as refused:
            resume_run.resume(place, RUN, "", overrides, force=force)
        assert refused.value.exit_code == 2
    assert resume_run.resume(place, RUN, "", {"steps": "999"}, force=True) == RUN
    assert read_recipe(ended.runs / RUN / "recipe.toml").steps == 999


def test_sums_that_leave_a_part_out_make_no_whole_checkpoint(here: HereHead):
    folder = make_checkpoint(here.runs / RUN, 4)
    sums = sums_of(folder)
    del sums["optimizer.safetensors"]
    (folder / "SHA256SUMS").write_text(sums_text(sums))
    assert runs.whole_checkpoint(here, RUN) == (None, [4])


def test_files_are_unpacked_by_a_python_that_knows_no_filters_too(here: HereHead, tmp_path, monkeypatch):
    """As Debian 12's own, 3.11.2."""
    unpack = shutil.unpack_archive
    monkeypatch.delattr(tarfile, "data_filter", raising=False)

    def of_before(archive, folder, kind):
        unpack(archive, folder, kind)

    monkeypatch.setattr(shutil, "unpack_archive", of_before)
    (tmp_path / "a.txt").write_text("a")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.txt", "b/a.txt")
    here.put(tmp_path / "a.tar.gz", tmp_path / "run")
    assert (tmp_path / "run" / "b" / "a.txt").read_text() == "a"


def test_a_supervisor_that_does_not_start_is_said_at_once(here: HereHead, monkeypatch):
    monkeypatch.setattr("training.laptop.head_node.ANSWER_S", 3600)  # that it has ended is seen, not waited for
    (here.runs / RUN / "logs").mkdir()
    launch = Launch(RUN, str(here.runs / RUN), (), "training.node.finetune", (), sys.executable, {}, here=True)
    with pytest.raises(HeadError, match=r"did not start.*supervisor\.log"):
        here.start(launch)  # no code was shipped


def test_a_run_is_found_while_it_is_started_again_and_after_a_start_that_came_to_nothing(here: HereHead):
    (here.runs / RUN / "logs").mkdir()
    launch = Launch(RUN, str(here.runs / RUN), (), "training.node.finetune", (), sys.executable, {}, here=True)
    (here.runs / RUN / "launch.json").write_text(launch_text(launch))
    (here.runs / RUN / "status.json").write_text(status_text(Status(RUN, "stopped")))
    with pytest.raises(HeadError, match="did not start"):
        here.start(launch)
    assert runs.find(here, RUN) == RUN and runs.look(here, RUN).state == "stopped"
    code = (  # stands in for a supervisor: says what it finds when it begins, and that it runs
        "import os, pathlib\n"
        "status = pathlib.Path('status.json')\n"
        "pathlib.Path('found').write_text(status.read_text())\n"
        "pathlib.Path('new').write_text(status.read_text().replace('stopped', 'running'))\n"
        "os.replace('new', status)\n"
    )
    (shipped := here.runs / RUN / "training" / "node" / "supervision").mkdir(parents=True)
    for package in (shipped, *shipped.parents[:2]):
        (package / "__init__.py").touch()
    (shipped / "supervise.py").write_text(code)
    here.start(launch)
    assert "stopped" in (here.runs / RUN / "found").read_text()
    assert "running" in (here.runs / RUN / "status.json").read_text()


STARTS = "sleep 0.3; printf '%s' \"$0\" >new; mv new status.json"


@pytest.mark.parametrize("early", [True, False], ids=["its early supervisor has ended", "none was started early"])
@pytest.mark.parametrize("unit", [["false"], ["true"], ["sh", "-c", STARTS, status_text(Status(RUN, "running"))]])
def test_a_head_keeps_what_is_known_of_a_run_until_its_supervisor_has_begun(head, tmp_path, monkeypatch, unit, early):
    monkeypatch.setattr("training.laptop.head_node.ANSWER_S", 60 if unit[0] == "sh" else 3)
    monkeypatch.setattr("training.laptop.head_node.unit_argv", lambda launch: ["env", "-C", launch.run_dir, *unit])
    head.runs = tmp_path
    (run := tmp_path / RUN).mkdir()
    launch = Launch(RUN, str(run), (), "training.node.finetune", (), sys.executable, {})
    (run / "launch.json").write_text(launch_text(launch))
    (run / "status.json").write_text(before := status_text(Status(RUN, "stopped", 'it "said" $HOME %s')))
    (run / "stop").touch()
    if unit[0] == "sh":
        head.start(launch, early=early)
        assert (run / "status.json").read_text() == unit[-1]
        assert (run / "go").exists() is early
    else:
        with pytest.raises(HeadError, match="did not start" if unit[0] == "true" else "env ended with 1"):
            head.start(launch, early=early)
        assert (run / "status.json").read_text() == before
    assert not (run / "stop").exists()


def test_a_command_without_an_end_is_the_heads_trouble(here: HereHead):
    with pytest.raises(HeadError, match="sleep: no end within"):
        here.shell("sleep 5", 0.1)


STAND_IN = """#!/bin/sh
# stands in for `python -m training.models.tiny FOLDER`, which takes half a minute
[ -e "$(dirname "$0")/broken" ] && exit 7
echo made >> "$(dirname "$0")/calls"
echo weights > "$3/config.json"
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch) -> Launch:
    """A place for models with a Python that makes `tiny` at once."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return Launch("", "", (), "", (), str(python), {}, str(tmp_path / "models"), here=True)


def test_tiny_is_made_once_and_again_when_its_code_changed(launch: Launch, tmp_path: Path, monkeypatch):
    recipe = load_recipe("tiny")
    made = base_model.here_base_model(recipe, launch)
    assert base_model.here_base_model(recipe, launch) == made
    assert (tmp_path / "calls").read_text().count("made") == 1
    other = tmp_path / "tiny.py"
    other.write_text("another one")
    monkeypatch.setattr(base_model, "TINY_CODE", other)
    assert base_model.here_base_model(recipe, launch) == made
    assert (tmp_path / "calls").read_text().count("made") == 2
    (tmp_path / "models" / "tiny" / "model.safetensors").write_bytes(b"cut")
    assert base_model.here_base_model(recipe, launch) == made
    assert (tmp_path / "calls").read_text().count("made") == 3


@pytest.mark.parametrize("record", [None, '{"commit": '])
def test_a_half_made_model_is_made_anew(launch: Launch, tmp_path: Path, record: str | None):
    half = tmp_path / "models" / "tiny"
    half.mkdir(parents=True)
    (half / "config.json").write_text("half")
    if record:
        (half / "spotune-model.json").write_text(record)
    base_model.here_base_model(load_recipe("tiny"), launch)
    assert (half / "config.json").read_text() == "weights\n"


def test_a_model_that_cannot_be_made_is_one_sentence(launch: Launch, tmp_path: Path, monkeypatch):
    (tmp_path / "broken").touch()
    with pytest.raises(LaunchError, match=r"could not be made: its program ended with 7"):
        base_model.here_base_model(load_recipe("tiny"), launch)
    (tmp_path / "broken").unlink()
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(base_model, "MAKING_S", 0.1)
    with pytest.raises(LaunchError, match="was not made within"):
        base_model.here_base_model(load_recipe("tiny"), launch)


@pytest.mark.parametrize("setting", ["lora.rank=8", "lora.targets=['q_proj']", "tuning=full", "lora.dora=true"])
def test_other_tensors_are_refused_even_by_force_before_anything_is_changed(setting: str):
    key, _, value = setting.partition("=")
    with pytest.raises(LaunchError, match=rf"^{key} cannot change within a run"):
        resume_run.changed_recipe(load_recipe("tiny").to_toml(), {key: value}, step=4, force=True)


@pytest.mark.parametrize(
    ("torch", "said"), [("2.13.0", ""), ("2.13.0+cu130", ""), ("2.11.0", "torch 2.11.0 (spotune's: 2.13.0)")]
)
def test_a_python_with_other_versions_than_the_nodes_get_is_named_before_a_start_here(torch, said, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    pins = dict(line.split("==") for line in base_model.PINS.read_text().splitlines() if "==" in line)
    there = pins | {"torch": torch}
    monkeypatch.setattr(base_model, "distributions", lambda name: [SimpleNamespace(version=there[name])])
    base_model.check_python_here()
    out = capsys.readouterr().err
    assert said in out and bool(out) == bool(said)


def test_force_is_named_only_where_it_would_help():
    def refused(overrides):
        with pytest.raises(LaunchError, match=r"^a resumed run keeps its recipe") as refusal:
            resume_run.changed_recipe(load_recipe("tiny").to_toml(), overrides, step=4, force=False)
        return str(refusal.value)

    assert "--force goes on" in refused({"optimizer.lr": "0.5"})
    both = refused({"optimizer.lr": "0.5", "lora.rank": "8"})
    assert "lora.rank 8 instead of" in both and "optimizer.lr 0.5 instead of" in both and "--force" not in both
    assert ". lora.rank cannot change within a run: a checkpoint has no tensors for it; without --resume" in both


def test_a_plan_that_was_cut_is_said_in_one_sentence(head, tmp_path):
    folder = tmp_path / "runs" / "tiny-20260131-154500"
    folder.mkdir(parents=True)
    head.runs = tmp_path / "runs"
    assert runs.plan_of(head, folder.name) == {}
    (folder / "plan.json").write_text('{"predicted": {"min')
    with pytest.raises(LaunchError, match=r"tiny-20260131-154500: its plan\.json on te1 cannot be read"):
        runs.predicted(head, folder.name)


def test_a_merged_model_of_another_start_of_the_same_id_is_not_brought_home(head, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_model, "LOCAL_RUNS", tmp_path / "home")
    theirs, mine = (tmp_path / where / "tiny-20260131-154500" / CLAIM for where in ("runs", "home"))
    for claim in (theirs, mine):
        claim.parent.mkdir(parents=True)
        claim.write_text("one start\n")
    head.runs = tmp_path / "runs"
    tuned_model.refuse_another_run(head, theirs.parent.name)
    theirs.write_text("another\n")
    with pytest.raises(FetchError, match="is not an earlier copy of this run"):
        tuned_model.refuse_another_run(head, theirs.parent.name)


OLD, NEWER, NEWEST = "tiny-20260129-080000", "tiny-20260130-120000", "tiny-20260131-154500"


@pytest.fixture
def learned(tmp_path: Path) -> HereHead:
    """Runs of which the newest failed before its first checkpoint."""
    for run_id, state, steps in ((OLD, "finished", (4,)), (NEWEST, "failed", ())):
        make_run(tmp_path, run_id, state=state, steps=steps)
    (tmp_path / NEWEST / "checkpoints" / "step-2.part").mkdir()
    return HereHead(tmp_path)


def test_a_newest_run_that_learned_nothing_gives_way_to_the_only_one_that_did(learned):
    note = f"{NEWEST}, the newest run, ended with no checkpoint: taking {OLD}"
    assert runs.newest_with_checkpoint(learned, None) == (OLD, note)
    assert runs.newest_with_checkpoint(learned, NEWEST) == (NEWEST, ""), "who names one means it"


def test_of_several_that_learned_something_one_has_to_be_named(learned):
    make_run(learned.runs, NEWER, steps=(2,))
    with pytest.raises(LaunchError, match=f"ended with no checkpoint; these have one, say which: {NEWER}, {OLD}"):
        runs.newest_with_checkpoint(learned, None)


def test_a_finished_run_is_nothing_to_resume(learned):
    assert runs.newest_with_checkpoint(learned, None, to_resume=True)[0] == NEWEST
    make_run(learned.runs, NEWER, state="stopped", steps=(2,))
    assert runs.newest_with_checkpoint(learned, None, to_resume=True)[0] == NEWER


def test_a_newest_run_with_a_checkpoint_is_taken_however_many_others_there_are(learned):
    make_run(learned.runs, NEWER, steps=(2,))
    (learned.runs / NEWEST / "checkpoints" / "step-2").mkdir()
    assert runs.newest_with_checkpoint(learned, None) == (NEWEST, "")


def test_a_run_of_another_recipe_is_no_candidate_for_the_one_that_is_named(learned):
    make_run(learned.runs, "qwen3-8b-20260201-080000", state="failed")
    assert runs.newest_with_checkpoint(learned, None, "qwen3-8b")[0] == "qwen3-8b-20260201-080000"


@pytest.mark.parametrize(
    ("typed", "called"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("./runs/tiny-20260131-154500/merged", "tiny-merged"),
        ("tiny-merged", "tiny-merged"),
        ("Somebody/Own-Model", "own-model"),
    ],
)
def test_runs_are_found_by_whatever_means_their_model(typed, called):
    assert start_run.run_name(typed) == called


@pytest.mark.parametrize(
    "go_on", [partial(resume_run.resume, recipe="", overrides={}, force=False), tuned_model.tuned_model]
)
def test_that_the_newest_run_is_not_the_one_that_was_taken_is_said(learned, capsys, go_on):
    shutil.rmtree(learned.runs / OLD)
    make_run(learned.runs, OLD, state="stopped", steps=(4,))
    with pytest.raises((LaunchError, AdapterError)):  # these folders have no more than names
        go_on(Session(learned), run_id=None)
    assert capsys.readouterr().out == f"{NEWEST}, the newest run, ended with no checkpoint: taking {OLD}\n"


@pytest.mark.parametrize(("user", "owner"), [("", 0), ("1234", 1234)])
def test_runs_are_read_by_root_and_by_who_logs_in_alone(head, tmp_path, monkeypatch, user, owner):
    """On machines that are shared. `user`: as sudo tells it to the commands that it runs."""
    monkeypatch.setenv("SUDO_UID", user) if user else monkeypatch.delenv("SUDO_UID", raising=False)
    head.runs = tmp_path / "runs"
    (tmp_path / "cache").mkdir(mode=0o755)
    head.runs.mkdir(mode=0o755)
    head.open_sftp().close()
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    found = head.runs.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, owner)


def test_after_ctrl_c_in_a_long_question_the_next_one_is_answered_at_once(head, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "long")
    monkeypatch.setattr("training.laptop.head_node.within", lambda seconds, work: interrupted(work))

    def left_behind(work):
        with contextlib.suppress(HeadError, ProgramError):  # the connection is closed in the end
            work()

    def interrupted(work):
        threading.Thread(target=left_behind, args=(work,), daemon=True).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        head.ask(fs.sha256, tmp_path / "long")  # waits for somebody to write
    monkeypatch.undo()
    assert head.ask(fs.exists, tmp_path)
    (tmp_path / "long").write_text("")


def test_where_runs_cannot_be_made_ones_own_that_is_the_heads_trouble(head, tmp_path, monkeypatch):
    monkeypatch.setenv("SUDO_UID", "-5")
    head.runs = tmp_path
    with pytest.raises(HeadError, match=r"^te1: "):
        head.open_sftp()
